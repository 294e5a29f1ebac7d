"""Routes of /v1/responses, as in OpenAI's API."""

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from coserve.server.bodies.reader import JsonRoute
from coserve.server.context import GenerationPart, ResponsesPart, Tenant
from coserve.server.errors import ApiError
from coserve.server.http.request_log import note_completion
from coserve.server.http.responses import answer, ignored_header, json_response, server_sent_event
from coserve.server.responses.history import items_before, keeper
from coserve.server.responses.items import input_items, page_of
from coserve.server.responses.request import response_request
from coserve.server.responses.schemas import Includable, ResponseBody
from coserve.server.responses.store import find, forget
from coserve.server.responses.writer import ResponseWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses")
async def create_response(
    body: ResponseBody,
    request: Request,
    context: GenerationPart,
    responses: ResponsesPart,
    tenant: Tenant,
) -> Response:
    """Create a response: complete, as a stream, or in the background."""
    arrival_s = time.monotonic()
    items = input_items(body.input)
    context.require_ready()
    before = await items_before(responses, tenant, body, items)
    chat = await response_request(body, [*before, *items], context, tenant, arrival_s)
    keep_it = keeper(responses, tenant, body, items)
    writer = ResponseWriter(context, body, chat, keep_it)
    id = chat.generation.id
    note_completion(request, id)
    if body.background:
        writer.response["status"] = "queued"
        await keep_it(writer.response)
        run = responses.runs.begin(
            _key(tenant, id), writer.background_events(), lambda: writer.response, writer.cancel
        )
        if body.stream:
            return await answer(request, events=_sent(run.watch()), ignored=body.ignored, end=b"")
        return json_response(writer.response, headers=ignored_header(body.ignored))
    if body.stream:
        return await answer(request, events=_sent(writer.events()), ignored=body.ignored, end=b"")
    return await answer(request, whole=writer.whole(), ignored=body.ignored)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: ResponseBody, context: GenerationPart, responses: ResponsesPart, tenant: Tenant
) -> Response:
    """Return the number of tokens of the input of such a request."""
    items = input_items(body.input)
    context.require_ready()
    before = await items_before(responses, tenant, body, items)
    chat = await response_request(body, [*before, *items], context, tenant, time.monotonic())
    return json_response(
        {"object": "response.input_tokens", "input_tokens": len(chat.generation.prompts[0])}
    )


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    response_id: str,
    request: Request,
    responses: ResponsesPart,
    tenant: Tenant,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0)] | None = None,
    include_obfuscation: bool = False,
    include: Annotated[list[Includable] | None, Query()] = None,
) -> Response:
    """Return a stored or running response; one in the background can be streamed while it runs."""
    run = responses.runs.find(_key(tenant, response_id))
    if run is None:
        record = await find(responses, tenant, response_id)
        if stream:
            raise ApiError(
                f"Response '{response_id}' has ended: it can be retrieved, but not streamed.",
                param="stream",
            )
        return json_response(record.response)
    if not stream:
        return json_response(run.state())
    return await answer(
        request,
        events=_sent(run.watch(0 if starting_after is None else starting_after + 1)),
        end=b"",
    )


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, responses: ResponsesPart, tenant: Tenant) -> Response:
    """Cancel a response in the background; one that has ended remains as it is."""
    await responses.runs.cancel(_key(tenant, response_id))
    record = await find(responses, tenant, response_id)
    if not record.response["background"]:
        raise ApiError("Cannot cancel a synchronous response.", param="response_id")
    return json_response(record.response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, responses: ResponsesPart, tenant: Tenant) -> Response:
    """Delete a response; later responses that follow it cannot be continued any more."""
    await responses.runs.cancel(_key(tenant, response_id))
    await forget(responses, tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    responses: ResponsesPart,
    tenant: Tenant,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    include: Annotated[list[Includable] | None, Query()] = None,
) -> Response:
    """List the new items of a response's input; `previous_response_id` has the earlier ones."""
    record = await find(responses, tenant, response_id)
    return json_response(page_of(record.input, order=order, after=after, limit=limit))


async def _sent(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield server_sent_event(event, event["type"])
    finally:
        await events.aclose()


def _key(tenant: str, id: str) -> tuple[str, str]:
    return tenant, id
