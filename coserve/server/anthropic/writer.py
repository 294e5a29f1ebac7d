"""Answers of /v1/messages, complete or as events."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from coserve.engine.request import Chunk
from coserve.server.chat.answer_reader import AnswerReader
from coserve.server.chat.request import ChatRequest
from coserve.server.errors import ApiError
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import Usage, chunks_of
from coserve.server.http.responses import server_sent_event
from coserve.server.tool_parsers.base import (
    Arguments,
    CallBegins,
    CallFails,
    Content,
    Part,
    Reasoning,
)

Event = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens"}
# Streamed blocks by type: the field that grows, and the type of its deltas.
_DELTAS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


class MessageWriter:
    """Writer of the blocks of one answer, from the engine's chunks.

    A tool call that turns out to be invalid becomes text; a stream, which has sent it already,
    leaves it as it is.
    """

    def __init__(self, context: GenerationContext, chat: ChatRequest) -> None:
        self._context, self._chat = context, chat
        self._reader = AnswerReader(chat.tools, chat.frame)
        self._usage = Usage(num_prompt=len(chat.generation.prompts[0]))
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the call under way
        self._is_open = False
        self._reason = ""
        self._stop: str | None = None  # the string that ended it

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        blocks = [block for block in self._blocks if "failed" not in block]
        return {
            **self._head(),
            "content": blocks,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop,
            "usage": self._usage_json(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, under Anthropic's names."""
        begun = False
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    begun = True
                    yield server_sent_event(event, event["type"])
        except ApiError as error:
            if not begun:
                raise
            yield server_sent_event({"type": "error", **error.body()}, "error")

    async def _events(self) -> AsyncGenerator[Event, None]:
        begun = False
        async with aclosing(chunks_of(self._context, self._chat.generation)) as batches:
            async for _, chunks in batches:
                if not begun:
                    begun = True
                    usage = {**self._usage_json(), "output_tokens": 0}
                    message = {
                        **self._head(),
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": usage,
                    }
                    yield {"type": "message_start", "message": message}
                for chunk in chunks:
                    for event in self._take(chunk):
                        yield event
        for event in self._close():
            yield event
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage_json()}
        yield {"type": "message_stop"}

    def _take(self, chunk: Chunk) -> list[Event]:
        self._usage.count(chunk)
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
            self._stop = chunk.stop_reason if isinstance(chunk.stop_reason, str) else None
        parts = self._reader.push(chunk.text, is_last=chunk.finish_reason is not None)
        return [event for part in parts for event in self._add(part)]

    def _add(self, part: Part) -> Iterator[Event]:
        if isinstance(part, CallBegins):
            yield from self._close()
            self._arguments = ""
            block = {
                "type": "tool_use",
                "id": self._reader.new_call_id(),
                "name": part.name,
                "input": {},
            }
            yield from self._open(block)
        elif isinstance(part, Arguments):
            self._arguments += part.text
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, CallFails):
            self._blocks[-1]["failed"] = True
            self._arguments = ""
            yield from self._close()
            yield from self._grow("text", part.text)
        else:
            assert isinstance(part, Content | Reasoning)
            yield from self._grow("text" if isinstance(part, Content) else "thinking", part.text)

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        field, delta = _DELTAS[kind]
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, field: "", **signature})
        self._blocks[-1][field] += text
        yield self._delta({"type": delta, field: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self._blocks.append(block)
        self._is_open = True
        yield {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": dict(block),
        }

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use" and self._arguments:
            self._blocks[-1]["input"] = json.loads(self._arguments)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop_reason(self) -> str:
        has_calls = any(
            block["type"] == "tool_use" and "failed" not in block for block in self._blocks
        )
        if self._reason == "stop" and has_calls:
            return "tool_use"
        return "stop_sequence" if self._stop is not None else _REASONS[self._reason]

    def _head(self) -> dict[str, Any]:
        generation = self._chat.generation
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.model,
        }

    def _usage_json(self) -> dict[str, Any]:
        """Return token counts, in which cached tokens are separate, as in Anthropic's API."""
        return {
            "input_tokens": self._usage.num_prompt - self._usage.num_cached,
            "output_tokens": self._usage.num_output,
            "cache_read_input_tokens": self._usage.num_cached,
            "cache_creation_input_tokens": 0,
        }
