"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from coserve.devices.messages import TokenLogprob
from coserve.devices.sampling_params import MAX_LOGPROBS
from coserve.engine.request import Chunk
from coserve.server.bodies import JsonRoute
from coserve.server.context import Context, ServerContext, Tenant
from coserve.server.errors import ApiError
from coserve.server.generation import (
    Generation,
    Usage,
    check_length,
    check_prompt,
    chunks_of,
    find_model,
    finite,
    most_tokens,
    new_id,
    now_s,
    sampling_params,
    slo_of,
)
from coserve.server.prompts import Prompts
from coserve.server.request_log import note_completion
from coserve.server.responses import answer, server_sent_event
from coserve.server.schemas import ChatBody, Message

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, context: Context, tenant: Tenant) -> Response:
    """Answer a chat."""
    arrival_s = time.monotonic()
    _refuse_what_is_not_there(body)
    generation = await _generation(body, context, tenant, arrival_s)
    usage = Usage(num_prompt=len(generation.prompts[0]))
    note_completion(request, generation.id)
    if body.stream:
        events = _events(context, generation, usage, body)
        return await answer(request, events=events)
    return await answer(request, whole=_whole(context, generation, usage))


def _refuse_what_is_not_there(body: ChatBody) -> None:
    for name in ("tools", "functions", "audio", "web_search_options", "moderation"):
        if getattr(body, name):
            raise ApiError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none", "auto"):
            raise ApiError(f"{name} must be none or auto: there are no tools", param=name)
    for place, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{place}].content"
            raise ApiError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            "response_format must be of type text: others are not supported",
            param="response_format",
            code="unsupported_parameter",
        )
    if body.modalities not in (None, ["text"]):
        raise ApiError('modalities must be ["text"]', param="modalities", code="unsupported_parameter")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise ApiError(
            f"top_logprobs must be a whole number from 0 to {MAX_LOGPROBS}, not {body.top_logprobs}",
            param="top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")


async def _generation(body: ChatBody, context: ServerContext, tenant: str, arrival_s: float) -> Generation:
    ready = context.admit()
    adapter = await find_model(context, tenant, body.model)
    messages = [_plain(message) for message in body.messages]
    check_length(context.prompts, messages, ready, param="messages")
    tokens = await context.prompts.tokens(messages)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(body, limit)
    if asked is not None and asked < 1:
        raise ApiError(f"{limit} must be at least 1, not {asked}", param=limit)
    max_tokens = asked if asked is not None else max(1, most_tokens(ready) - len(tokens))
    check_prompt(tokens, max_tokens, ready, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Generation(
        id=new_id("chatcmpl"),
        created=now_s(),
        model=body.model,
        prompts=(tuple(tokens),),
        params=sampling_params(body, max_tokens=max_tokens, vocab_size=ready.vocab_size, logprobs=logprobs),
        slo=slo_of(body, ready.slo),
        arrival_s=arrival_s,
        tenant=tenant,
        adapter=adapter,
    )


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: its text in one piece, and developers are the system."""
    plain = {name: value for name, value in message.model_dump().items() if value is not None}
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", "")
    if message.role == "developer":
        plain["role"] = "system"
    return plain


async def _whole(context: ServerContext, generation: Generation, usage: Usage) -> dict[str, Any]:
    texts = [""] * generation.params.n
    logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
    reasons = [""] * len(texts)
    async with aclosing(chunks_of(context, generation)) as batches:
        async for _, chunks in batches:
            usage.count(chunks)
            for chunk in chunks:
                texts[chunk.index] += chunk.text
                logprobs[chunk.index] += chunk.logprobs
                reasons[chunk.index] = chunk.finish_reason or ""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _logprobs(context.prompts, found) if generation.params.logprobs is not None else None,
            "finish_reason": reason,
        }
        for index, (text, found, reason) in enumerate(zip(texts, logprobs, reasons, strict=True))
    ]
    return {**_head(context, generation, "chat.completion"), "choices": choices, "usage": usage.to_json()}


async def _events(
    context: ServerContext, generation: Generation, usage: Usage, body: ChatBody
) -> AsyncGenerator[bytes, None]:
    head = _head(context, generation, "chat.completion.chunk")
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    if with_usage:
        head["usage"] = None
    begun = False
    async with aclosing(chunks_of(context, generation)) as batches:
        async for _, chunks in batches:
            if not begun:
                begun = True
                for index in range(generation.params.n):
                    yield server_sent_event({**head, "choices": [_delta(index, {"role": "assistant", "content": ""})]})
            usage.count(chunks)
            for chunk in chunks:
                for choice in _choices(context.prompts, chunk, generation.params.logprobs is not None):
                    yield server_sent_event({**head, "choices": [choice]})
    if with_usage:
        yield server_sent_event({**head, "choices": [], "usage": usage.to_json()})


def _choices(prompts: Prompts, chunk: Chunk, with_logprobs: bool) -> list[dict[str, Any]]:
    """What a chunk adds to a stream: its text, and by itself why it was the last."""
    found = []
    if chunk.text or chunk.logprobs:
        logprobs = _logprobs(prompts, list(chunk.logprobs)) if with_logprobs else None
        found.append(_delta(chunk.index, {"content": chunk.text}, logprobs=logprobs))
    if chunk.finish_reason is not None:
        found.append(_delta(chunk.index, {}, reason=chunk.finish_reason))
    return found


def _delta(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _head(context: ServerContext, generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "system_fingerprint": context.fingerprint,
    }


def _logprobs(prompts: Prompts, found: list[TokenLogprob]) -> dict[str, Any]:
    content = [
        {**_one(prompts, each.token, each.logprob), "top_logprobs": [_one(prompts, *top) for top in each.top]}
        for each in found
    ]
    return {"content": content, "refusal": None}


def _one(prompts: Prompts, token: int, logprob: float) -> dict[str, Any]:
    piece = prompts.piece(token)
    return {"token": piece.text, "logprob": finite(logprob), "bytes": piece.raw}
