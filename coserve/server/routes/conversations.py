"""Routes of /v1/conversations, as in OpenAI's API: items that responses continue and add to."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from coserve.jobs.records import ConversationRecord, new_id
from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import Body, List
from coserve.server.context import ResponsesPart, Tenant
from coserve.server.errors import not_found
from coserve.server.http.responses import json_response
from coserve.server.responses.conversations import (
    check_new,
    create_conversation,
    extend_conversation,
    find_conversation,
    items_of,
    label_conversation,
    remove_conversation,
    remove_item,
)
from coserve.server.responses.items import input_items, page_of
from coserve.server.responses.request import check_metadata
from coserve.server.responses.schemas import Includable, InputItem

router = APIRouter(route_class=JsonRoute)
# OpenAI's limit.
_MAX_ITEMS = 20


class ConversationBody(Body):
    """Body of POST /v1/conversations."""

    items: Annotated[List[InputItem], Field(max_length=_MAX_ITEMS)] | None = None
    """First items."""
    metadata: dict[str, Any] | None = None
    """The client's own data."""


class ChangeBody(Body):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: dict[str, Any] | None
    """The client's own data, which replaces the previous."""


class ItemsBody(Body):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[List[InputItem], Field(min_length=1, max_length=_MAX_ITEMS)]
    """New items."""


@router.post("/v1/conversations")
async def create(body: ConversationBody, responses: ResponsesPart, tenant: Tenant) -> Response:
    """Create a conversation."""
    check_metadata(body.metadata)
    items = input_items(body.items or (), "items")
    check_new(items, (), param="items")
    now = int(time.time())
    record = ConversationRecord(
        id=new_id("conv_"), tenant=tenant, created_at=now, used_at=now, metadata=body.metadata or {}
    )
    await create_conversation(responses, record, items)
    return json_response(_conversation(record))


@router.get("/v1/conversations/{conversation_id}")
async def retrieve(conversation_id: str, responses: ResponsesPart, tenant: Tenant) -> Response:
    """Return a conversation."""
    return json_response(_conversation(await find_conversation(responses, tenant, conversation_id)))


@router.post("/v1/conversations/{conversation_id}")
async def change(
    conversation_id: str, body: ChangeBody, responses: ResponsesPart, tenant: Tenant
) -> Response:
    """Replace the metadata of a conversation."""
    check_metadata(body.metadata)
    if (
        record := await label_conversation(responses, tenant, conversation_id, body.metadata or {})
    ) is None:
        raise _no_conversation(conversation_id)
    return json_response(_conversation(record))


@router.delete("/v1/conversations/{conversation_id}")
async def delete(conversation_id: str, responses: ResponsesPart, tenant: Tenant) -> Response:
    """Delete a conversation with its items; responses made in it remain."""
    if not await remove_conversation(responses, tenant, conversation_id):
        raise _no_conversation(conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/v1/conversations/{conversation_id}/items")
async def add_items(
    conversation_id: str,
    body: ItemsBody,
    responses: ResponsesPart,
    tenant: Tenant,
    include: Annotated[list[Includable] | None, Query()] = None,
) -> Response:
    """Add items at the end of a conversation."""
    items = input_items(body.items, "items")
    if not await extend_conversation(responses, tenant, conversation_id, items):
        raise _no_conversation(conversation_id)
    return json_response(page_of(items, order="asc", limit=len(items)))


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(
    conversation_id: str,
    responses: ResponsesPart,
    tenant: Tenant,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    include: Annotated[list[Includable] | None, Query()] = None,
) -> Response:
    """List the items of a conversation."""
    items = await items_of(responses, tenant, conversation_id)
    return json_response(page_of(items, order=order, after=after, limit=limit))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(
    conversation_id: str,
    item_id: str,
    responses: ResponsesPart,
    tenant: Tenant,
    include: Annotated[list[Includable] | None, Query()] = None,
) -> Response:
    """Return an item of a conversation."""
    items = await items_of(responses, tenant, conversation_id)
    match = next((item for item in items if item["id"] == item_id), None)
    if match is None:
        raise _no_item(item_id)
    return json_response(match)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(
    conversation_id: str, item_id: str, responses: ResponsesPart, tenant: Tenant
) -> Response:
    """Delete an item of a conversation."""
    record, was_there = await remove_item(responses, tenant, conversation_id, item_id)
    if record is None:
        raise _no_conversation(conversation_id)
    if not was_there:
        raise _no_item(item_id)
    return json_response(_conversation(record))


def _no_conversation(id: str) -> Exception:
    return not_found(f"Conversation with id '{id}' not found.", param="conversation_id")


def _no_item(id: str) -> Exception:
    return not_found(f"Item with id '{id}' not found in the conversation.", param="item_id")


def _conversation(record: ConversationRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "conversation",
        "created_at": record.created_at,
        "metadata": record.metadata or {},
    }
