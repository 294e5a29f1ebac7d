"""Answers to lines of batches, made as their routes would make them, but as batch work."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from coserve.server.batches.lines import LineRequest
from coserve.server.bodies.other_fields import FieldPolicy
from coserve.server.bodies.reader import body_of
from coserve.server.bodies.schemas import ChatBody, CompletionBody, SamplingBody
from coserve.server.chat.request import chat_request
from coserve.server.chat.writer import ChatWriter
from coserve.server.errors import ApiError
from coserve.server.generation.completions import CompletionWriter, completion_request
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.embeddings import EmbeddingBody, embedding_request, embeddings
from coserve.server.generation.generation import Generation
from coserve.server.responses.context import ResponsesContext
from coserve.server.responses.history import items_before, keeper
from coserve.server.responses.items import input_items
from coserve.server.responses.request import response_request
from coserve.server.responses.schemas import ResponseBody
from coserve.server.responses.writer import ResponseWriter


@dataclass(frozen=True, kw_only=True)
class LineContext:
    """Parts of the server that answer lines of batches."""

    generation: GenerationContext
    """Way of requests to the engine."""
    responses: ResponsesContext
    """Store of responses and conversations."""
    fields: FieldPolicy
    """Decision on fields that a body does not have."""


Answer = Callable[[LineRequest, LineContext], Awaitable[dict[str, Any]]]


async def _chat(request: LineRequest, context: LineContext) -> dict[str, Any]:
    body = body_of(ChatBody, request.body, context.fields)
    _refuse_stream(body)
    chat = await chat_request(body, context.generation, request.tenant, monotonic())
    return await ChatWriter(
        context.generation, replace(chat, generation=_as_batch_work(chat.generation, request))
    ).whole()


async def _completion(request: LineRequest, context: LineContext) -> dict[str, Any]:
    body = body_of(CompletionBody, request.body, context.fields)
    _refuse_stream(body)
    asked = await completion_request(body, context.generation, request.tenant, monotonic())
    generation = _as_batch_work(asked.generation, request)
    return await CompletionWriter(context.generation, replace(asked, generation=generation)).whole()


async def _response(request: LineRequest, context: LineContext) -> dict[str, Any]:
    body = body_of(ResponseBody, request.body, context.fields)
    _refuse_stream(body)
    if body.background:
        raise ApiError("background is not available in a batch; leave it out", param="background")
    tenant, items = request.tenant, input_items(body.input)
    before = await items_before(context.responses, tenant, body, items)
    chat = await response_request(body, [*before, *items], context.generation, tenant, monotonic())
    chat = replace(chat, generation=_as_batch_work(chat.generation, request))
    keep = keeper(context.responses, tenant, body, items)
    return await ResponseWriter(context.generation, body, chat, keep).whole()


async def _embedding(request: LineRequest, context: LineContext) -> dict[str, Any]:
    body = body_of(EmbeddingBody, request.body, context.fields)
    generation = await embedding_request(body, context.generation, request.tenant, monotonic())
    return await embeddings(body, _as_batch_work(generation, request), context.generation)


def _as_batch_work(generation: Generation, request: LineRequest) -> Generation:
    """Return a generation as batch work of a line."""
    return replace(generation, batch_due_s=request.due_s, without_jobs=request.is_suspect)


def _refuse_stream(body: SamplingBody) -> None:
    if body.stream:
        raise ApiError(
            "stream is not available in a batch", param="stream", code="unsupported_parameter"
        )


ANSWERS: Mapping[str, Answer] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embedding,
}
