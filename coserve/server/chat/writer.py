"""Answers of /v1/chat/completions, complete or as events."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from coserve.devices.messages.steps import TokenLogprob
from coserve.engine.request import Chunk
from coserve.server.chat.choice import ChatChoice
from coserve.server.chat.request import ChatRequest
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import Usage, UsageOptions, chunks_of, finite
from coserve.server.generation.token_details import TokenDetails
from coserve.server.http.responses import server_sent_event


class ChatWriter:
    """Writer of the answer to one chat, from the engine's chunks."""

    def __init__(self, context: GenerationContext, chat: ChatRequest) -> None:
        generation = chat.generation
        self._context, self._generation, self._frame, self._details = (
            context,
            generation,
            chat.frame,
            chat.details,
        )
        self._usage = Usage(num_prompt=len(generation.prompts[0]))
        self._choices = [ChatChoice(chat.tools, chat.frame) for _ in range(generation.params.n)]
        self._with_logprobs = generation.params.logprobs is not None

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        logprobs: list[list[TokenLogprob]] = [[] for _ in self._choices]
        tokens: list[list[int]] = [[] for _ in self._choices]
        of_prompt: list[TokenLogprob] = []
        reasons = [""] * len(self._choices)
        stops: list[str | int | None] = [None] * len(self._choices)
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                choice = self._choices[chunk.index]
                self._usage.count(chunk)
                choice.add(chunk.text, is_last=chunk.finish_reason is not None)
                logprobs[chunk.index] += chunk.logprobs
                tokens[chunk.index] += chunk.tokens
                of_prompt += chunk.prompt_logprobs
                reasons[chunk.index] = choice.reason(chunk.finish_reason or "")
                stops[chunk.index] = chunk.stop_reason
        choices = []
        for index, choice in enumerate(self._choices):
            await asyncio.sleep(0)  # lets others run: many log-probabilities take long
            choices.append(
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": logprobs_of(self._details, logprobs[index])
                    if self._with_logprobs
                    else None,
                    "finish_reason": reasons[index],
                    "stop_reason": stops[index],
                    **self._details.ids(tokens[index]),
                }
            )
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self._usage.to_json(),
            **self._details.prompt_ids(self._generation.prompts[0]),
            "prompt_logprobs": None,
            **self._details.prompt_logprobs(of_prompt),
        }

    async def events(self, options: UsageOptions) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        head = self._head("chat.completion.chunk")
        begun = False
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if not begun:
                    begun = True
                    ids = self._details.prompt_ids(self._generation.prompts[0])
                    for first in self._first_deltas():
                        yield server_sent_event(
                            {**head, "choices": [first], **options.of_chunk(self._usage), **ids}
                        )
                        ids = {}
                self._usage.count(chunk)
                for choice in self._deltas(chunk):
                    yield server_sent_event(
                        {**head, "choices": [choice], **options.of_chunk(self._usage)}
                    )
        if options.at_end:
            yield server_sent_event({**head, "choices": [], "usage": self._usage.to_json()})

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        async with aclosing(chunks_of(self._context, self._generation)) as batches:
            async for _, chunks in batches:
                for chunk in chunks:
                    yield chunk

    def _first_deltas(self) -> list[dict[str, Any]]:
        """Return the first deltas of all choices: the role, and the echoed message."""
        indices = range(len(self._choices))
        deltas = [_delta(index, {"role": self._frame.role, "content": ""}) for index in indices]
        return deltas + [
            _delta(index, {"content": self._frame.echo}) for index in indices if self._frame.echo
        ]

    def _deltas(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of a chunk.

        There is always one, even with empty text: clients count the steps that made a token. The
        last one has the finish reason.
        """
        choice = self._choices[chunk.index]
        delta = choice.add(chunk.text, is_last=chunk.finish_reason is not None)
        reason = None if chunk.finish_reason is None else choice.reason(chunk.finish_reason)
        if not (delta or chunk.tokens):
            return (
                []
                if reason is None
                else [_delta(chunk.index, {}, reason=reason, stop=chunk.stop_reason)]
            )
        logprobs = logprobs_of(self._details, list(chunk.logprobs)) if self._with_logprobs else None
        new = _delta(
            chunk.index,
            delta or {"content": ""},
            logprobs=logprobs,
            reason=reason,
            stop=chunk.stop_reason,
        )
        return [{**new, **self._details.ids(chunk.tokens)}]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "object": kind,
            "created": self._generation.created,
            "model": self._generation.model,
            "system_fingerprint": self._context.fingerprint,
        }


def _delta(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
    stop: str | int | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop,
    }


def logprobs_of(details: TokenDetails, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in OpenAI's form for chats."""
    content = [
        {
            **_one(details, each.token, each.logprob),
            "top_logprobs": [_one(details, *top) for top in details.top(each)],
        }
        for each in found
    ]
    return {"content": content, "refusal": None}


def _one(details: TokenDetails, token: int, logprob: float) -> dict[str, Any]:
    piece = details.prompts.piece(token)
    return {
        "token": details.name(token, piece.text),
        "logprob": finite(logprob),
        "bytes": piece.raw,
    }
