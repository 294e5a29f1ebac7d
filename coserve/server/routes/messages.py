"""/v1/messages, as Anthropic has it."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from coserve.server.bodies import JsonRoute
from coserve.server.context import Context, Tenant
from coserve.server.message_request import message_request
from coserve.server.message_schemas import CountBody, MessagesBody
from coserve.server.message_writer import MessageWriter
from coserve.server.request_log import note_completion
from coserve.server.responses import answer, json_response

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request, context: Context, tenant: Tenant) -> Response:
    """Answer a conversation."""
    chat = await message_request(body, context, tenant, time.monotonic())
    writer = MessageWriter(context, chat)
    note_completion(request, chat.generation.id)
    if body.stream:
        return await answer(request, events=writer.events(), end=b"")
    return await answer(request, whole=writer.whole())


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, context: Context, tenant: Tenant) -> Response:
    """How many tokens a conversation has."""
    chat = await message_request(body, context, tenant, time.monotonic())
    return json_response({"input_tokens": len(chat.generation.prompts[0])})
