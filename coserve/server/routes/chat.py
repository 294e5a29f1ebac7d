"""Routes of /v1/chat/completions."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import ChatBatchBody, ChatBody
from coserve.server.chat.prompt import ignored_fields
from coserve.server.chat.request import chat_request
from coserve.server.chat.writer import ChatWriter
from coserve.server.context import GenerationPart, Tenant
from coserve.server.errors import ApiError
from coserve.server.generation.generation import UsageOptions, new_id
from coserve.server.http.request_log import note_completion
from coserve.server.http.responses import answer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, context: GenerationPart, tenant: Tenant
) -> Response:
    """Answer a chat."""
    chat = await chat_request(body, context, tenant, time.monotonic())
    writer = ChatWriter(context, chat)
    note_completion(request, chat.generation.id)
    ignored = ignored_fields(body, context.prompts.chat_template)
    if body.stream:
        return await answer(
            request, events=writer.events(UsageOptions.of(body.stream_options)), ignored=ignored
        )
    return await answer(request, whole=writer.whole(), ignored=ignored)


@router.post("/v1/chat/completions/batch")
async def chat_completions_batch(
    body: ChatBatchBody, request: Request, context: GenerationPart, tenant: Tenant
) -> Response:
    """Answer several chats; each has one choice, in their order."""
    if body.stream:
        raise ApiError(
            "stream is not available for several chats",
            param="stream",
            code="unsupported_parameter",
        )
    if body.n not in (None, 1):
        raise ApiError(
            "n must be 1: each chat has one choice", param="n", code="unsupported_parameter"
        )
    arrival_s, id = time.monotonic(), new_id("chatcmpl")
    fields = {name: getattr(body, name) for name in ChatBody.model_fields}
    chats = []
    for place, messages in enumerate(body.messages):
        try:
            one = ChatBody.model_construct(**{**fields, "messages": messages})
            chat = await chat_request(one, context, tenant, arrival_s, id=f"{id}-{place}")
        except ApiError as error:
            error.param = (error.param or "").replace("messages", f"messages[{place}]", 1) or None
            raise
        chats.append(chat)
    note_completion(request, id)

    async def whole() -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ChatWriter(context, chat).whole()) for chat in chats]
        answers = [task.result() for task in tasks]
        usage: dict[str, Any] = {}
        for place, one in enumerate(answers):
            one["choices"][0]["index"] = place
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                usage[name] = usage.get(name, 0) + one["usage"][name]
        return {
            **answers[0],
            "id": id,
            "choices": [one["choices"][0] for one in answers],
            "usage": usage,
        }

    async def with_one_error() -> dict[str, Any]:
        try:
            return await whole()
        except ExceptionGroup as errors:  # one error suffices
            raise errors.exceptions[0] from None

    return await answer(
        request, whole=with_one_error(), ignored=ignored_fields(body, context.prompts.chat_template)
    )
