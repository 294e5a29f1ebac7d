"""Stored responses."""

import asyncio
import time
from collections.abc import Collection
from typing import Any

from coserve.jobs.records import ResponseRecord
from coserve.jobs.sql.store import Store
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError, not_found
from coserve.server.http.responses import to_json
from coserve.server.responses.context import ResponsesContext
from coserve.server.stored.lookup import find_stored

# Seconds for which responses are stored, as in OpenAI's API.
_KEPT_S = 30 * 24 * 3600
# States of responses that ended well.
USABLE = ("completed", "incomplete")
# Maximum number of responses that continue one another.
_LONGEST_CHAIN = 10_000


def unfinished(store: Store) -> list[str]:
    """Return the ids of unfinished responses; at a start, those that an earlier process left.
    Blocks.
    """
    with store.read() as transaction:
        return transaction.unfinished_responses()


def end_unfinished(store: Store, ids: Collection[str]) -> None:
    """Mark responses of an earlier process as failed. Blocks."""
    error = {
        "code": "server_error",
        "message": "The server was restarted before the response was complete.",
    }
    with store.write() as transaction:
        transaction.end_unfinished_responses(ids, error)


async def keep(
    context: ResponsesContext, tenant: str, items: list[Any], response: dict[str, Any]
) -> None:
    """Store the current state of a response.

    Args:
        context: Store of responses and conversations.
        tenant: Tenant that it belongs to.
        items: New items of its input.
        response: The response.
    """
    record = ResponseRecord(
        id=response["id"],
        tenant=tenant,
        created_at=response["created_at"],
        expires_at=int(time.time()) + _KEPT_S,
        status=response["status"],
        previous=response["previous_response_id"],
        num_bytes=len(to_json(items)) + len(to_json(response)),
        input=items,
        response=dict(response),
    )

    def put() -> None:
        with context.jobs.store.write() as transaction:
            transaction.put_response(record, most_bytes=context.max_bytes)

    await asyncio.to_thread(put)


async def find(context: ResponsesContext, tenant: str, id: str) -> ResponseRecord:
    """Return a tenant's response.

    Raises:
        ApiError: There is none of this id.
    """
    missing = f"Response with id '{id}' not found."
    return await find_stored(
        context.jobs,
        id,
        lambda store: store.response(tenant, id),
        param="response_id",
        missing=missing,
    )


async def forget(context: ResponsesContext, tenant: str, id: str) -> None:
    """Delete a tenant's response.

    Raises:
        ApiError: There is none of this id.
    """
    check_texts(id, param="response_id")

    def remove() -> bool:
        with context.jobs.store.write() as transaction:
            return transaction.remove_response(tenant, id)

    if not await asyncio.to_thread(remove):
        raise not_found(f"Response with id '{id}' not found.", param="response_id")


async def items_up_to(
    context: ResponsesContext, tenant: str, previous: str | None
) -> list[dict[str, Any]]:
    """Return all items up to the end of a response, including those of previous responses.

    Raises:
        ApiError: One of them does not exist, or did not end well.
    """
    if previous is None:
        return []
    check_texts(previous, param="previous_response_id")

    def read() -> list[ResponseRecord]:
        records: list[ResponseRecord] = []
        id: str | None = previous
        with context.jobs.store.read() as transaction:
            while id is not None and len(records) < _LONGEST_CHAIN:
                record = transaction.response(tenant, id)
                if record is None:
                    raise not_found(
                        f"Previous response with id '{id}' not found.",
                        param="previous_response_id",
                        code="previous_response_not_found",
                    )
                records.append(record)
                id = record.previous
        return records

    items: list[dict[str, Any]] = []
    for record in reversed(await asyncio.to_thread(read)):
        if record.status not in USABLE:
            raise ApiError(
                f"Response '{record.id}' is {record.status}: only one that is "
                f"{' or '.join(USABLE)} can be followed",
                param="previous_response_id",
            )
        items += [*record.input, *record.response["output"]]
    return items
