"""Answers of /v1/responses as events, the last of which has the complete response."""

import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from coserve.engine.request import Chunk
from coserve.errors import CoserveError
from coserve.server.chat.answer_reader import AnswerReader
from coserve.server.chat.request import ChatRequest
from coserve.server.chat.writer import logprobs_of
from coserve.server.errors import ApiError, as_api_error
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.generation import Usage, chunks_of
from coserve.server.responses.output import Event, ResponseOutput
from coserve.server.responses.schemas import FunctionTool, ResponseBody
from coserve.server.responses.tool_namespaces import apart
from coserve.server.tool_parsers.base import CallBegins, Content

Response = dict[str, Any]
Keep = Callable[[Response], Coroutine[Any, Any, None]]


class ResponseWriter:
    """Writer of one response; `response` is its current state."""

    def __init__(
        self, context: GenerationContext, body: ResponseBody, chat: ChatRequest, keep: Keep
    ) -> None:
        """Begin a response.

        Args:
            context: Parts of the server.
            body: Body of the request.
            chat: The chat that it asks for.
            keep: Function that stores the response at its end, before clients see it.
        """
        self._context, self._chat, self._keep = context, chat, keep
        self._output, self._reader = (
            ResponseOutput(apart(body.tools)),
            AnswerReader(chat.tools, chat.frame),
        )
        self._usage = Usage(num_prompt=len(chat.generation.prompts[0]))
        self._num_reasoning = self._number = 0
        self._logprobs: list[dict[str, Any]] = []
        self.response = _fresh(body, chat)

    async def whole(self) -> Response:
        """Return the complete response.

        Raises:
            ApiError: It failed.
        """
        async with aclosing(self._run()) as events:
            async for _ in events:
                pass
        return self.response

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of a stream.

        Raises:
            ApiError: It failed before the first token; later, an event says so.
        """
        begun = False
        try:
            async with aclosing(self._run()) as events:
                async for event in events:
                    begun = True
                    yield self._numbered(event)
        except (ApiError, CoserveError) as error:
            if not begun:
                raise
            await self.fail(error)
            yield self._numbered({"type": "response.failed", "response": dict(self.response)})

    async def background_events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of a response in the background, in which every failure is an event."""
        self.response["status"] = "queued"
        yield self._numbered({"type": "response.queued", "response": dict(self.response)})
        self.response["status"] = "in_progress"
        try:
            async with aclosing(self._run()) as events:
                async for event in events:
                    yield self._numbered(event)
        except (ApiError, CoserveError) as error:
            await self.fail(error)
            yield self._numbered({"type": "response.failed", "response": dict(self.response)})

    async def fail(self, fault: ApiError | CoserveError) -> None:
        """Mark the response as failed, even if that cannot be stored."""
        error = fault if isinstance(fault, ApiError) else as_api_error(fault)
        code = (
            "rate_limit_exceeded"
            if error.status == 429
            else "invalid_prompt"
            if error.status < 500
            else "server_error"
        )
        with suppress(CoserveError):
            await self._end("failed", error={"code": code, "message": error.message})

    async def cancel(self) -> None:
        """Mark the response as cancelled by its client."""
        await self._end("cancelled")

    async def _end(self, status: str, **more: Any) -> None:
        self.response |= {
            "status": status,
            "output": self._output.items,
            "usage": self._usage_json(),
            **more,
        }
        await self._keep(self.response)

    async def _run(self) -> AsyncGenerator[Event, None]:
        begun, reason = False, ""
        async with aclosing(chunks_of(self._context, self._chat.generation)) as batches:
            async for _, chunks in batches:
                if not begun:
                    begun = True
                    # Not before the first chunk: until then an error gets its HTTP status.
                    for name in ("created", "in_progress"):
                        yield {"type": f"response.{name}", "response": dict(self.response)}
                for chunk in chunks:
                    reason = chunk.finish_reason or ""
                    for event in self._take(chunk):
                        yield event
        is_cut = reason == "length"
        for event in self._output.close("incomplete" if is_cut else "completed"):
            yield event
        if is_cut:
            await self._end("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            await self._end("completed", completed_at=int(time.time()))
        yield {"type": f"response.{self.response['status']}", "response": dict(self.response)}

    def _take(self, chunk: Chunk) -> list[Event]:
        self._usage.count(chunk)
        parts = self._reader.push(chunk.text, is_last=chunk.finish_reason is not None)
        self._num_reasoning += len(chunk.tokens) * self._reader.was_reasoning
        if not self._reader.was_reasoning:
            self._logprobs += logprobs_of(self._chat.details, chunk.logprobs)["content"]
        events: list[Event] = []
        for part in parts:
            call_id = self._reader.new_call_id() if isinstance(part, CallBegins) else ""
            logprobs = []
            if isinstance(part, Content):  # also of tokens before it that are parts of characters
                logprobs, self._logprobs = self._logprobs, []
            events += self._output.take(part, call_id, logprobs)
        return events

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _usage_json(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": usage.num_prompt + usage.num_output,
        }


def _fresh(body: ResponseBody, chat: ChatRequest) -> Response:
    """Return a response before its first token, with the fields of its request."""
    generation = chat.generation
    text = (
        {"format": {"type": "text"}}
        if body.text is None
        else body.text.model_dump(by_alias=True, exclude_none=True)
    )
    reasoning = body.reasoning
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "status": "in_progress",
        "background": bool(body.background),
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": body.store is not False,
        "temperature": generation.params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": generation.params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool in the form of OpenAI's answers."""
    fields = tool.model_dump(exclude_none=True)
    return fields if tool.type == "namespace" else {"parameters": None, "strict": None, **fields}
