"""One request of a batch: asked as its route would be, but for nobody who waits."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from coserve.server.bodies import body_of
from coserve.server.chat_request import chat_request
from coserve.server.chat_writer import ChatWriter
from coserve.server.completion_request import CompletionWriter, completion_request
from coserve.server.context import ServerContext
from coserve.server.embedding_request import EmbeddingBody, embedding_request, embeddings
from coserve.server.errors import ApiError
from coserve.server.response_history import items_before, keeper
from coserve.server.response_items import input_items
from coserve.server.response_request import response_request
from coserve.server.response_schemas import ResponseBody
from coserve.server.response_writer import ResponseWriter
from coserve.server.schemas import ChatBody, CompletionBody, SamplingBody

# From a body, by the engine's clock until when, to the answer.
Answer = Callable[[Any, ServerContext, str, float], Awaitable[dict[str, Any]]]


async def _chat(value: Any, context: ServerContext, tenant: str, due_s: float) -> dict[str, Any]:
    body = body_of(ChatBody, value, context.fields)
    _refuse_stream(body)
    chat = await chat_request(body, context, tenant, monotonic())
    return await ChatWriter(context, replace(chat, generation=replace(chat.generation, batch_due_s=due_s))).whole()


async def _completion(value: Any, context: ServerContext, tenant: str, due_s: float) -> dict[str, Any]:
    body = body_of(CompletionBody, value, context.fields)
    _refuse_stream(body)
    request = await completion_request(body, context, tenant, monotonic())
    generation = replace(request.generation, batch_due_s=due_s)
    return await CompletionWriter(context, replace(request, generation=generation)).whole()


async def _response(value: Any, context: ServerContext, tenant: str, due_s: float) -> dict[str, Any]:
    body = body_of(ResponseBody, value, context.fields)
    _refuse_stream(body)
    if body.background:
        raise ApiError("background is of no use in a batch; leave it out", param="background")
    items = input_items(body.input)
    before = await items_before(context, tenant, body, items)
    chat = await response_request(body, [*before, *items], context, tenant, monotonic())
    chat = replace(chat, generation=replace(chat.generation, batch_due_s=due_s))
    return await ResponseWriter(context, body, chat, keeper(context, tenant, body, items)).whole()


async def _embedding(value: Any, context: ServerContext, tenant: str, due_s: float) -> dict[str, Any]:
    body = body_of(EmbeddingBody, value, context.fields)
    generation = await embedding_request(body, context, tenant, monotonic())
    return await embeddings(body, replace(generation, batch_due_s=due_s), context)


def _refuse_stream(body: SamplingBody) -> None:
    if body.stream:
        raise ApiError("stream is not available in a batch", param="stream", code="unsupported_parameter")


ANSWERS: Mapping[str, Answer] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embedding,
}
