"""Routes of /v1/messages, as in Anthropic's API."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from coserve.server.anthropic.request import message_request
from coserve.server.anthropic.schemas import CountBody, MessagesBody
from coserve.server.anthropic.writer import MessageWriter
from coserve.server.bodies.reader import JsonRoute
from coserve.server.context import GenerationPart, Tenant
from coserve.server.http.request_log import note_completion
from coserve.server.http.responses import answer, ignored_header, json_response

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def create_message(
    body: MessagesBody, request: Request, context: GenerationPart, tenant: Tenant
) -> Response:
    """Answer a conversation."""
    chat = await message_request(body, context, tenant, time.monotonic())
    writer = MessageWriter(context, chat)
    note_completion(request, chat.generation.id)
    if body.stream:
        return await answer(request, events=writer.events(), ignored=body.ignored, end=b"")
    return await answer(request, whole=writer.whole(), ignored=body.ignored)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, context: GenerationPart, tenant: Tenant) -> Response:
    """Return the number of tokens of a conversation."""
    chat = await message_request(body, context, tenant, time.monotonic())
    count = {"input_tokens": len(chat.generation.prompts[0])}
    return json_response(count, headers=ignored_header(body.ignored))
