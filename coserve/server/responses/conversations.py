"""Stored conversations and their items."""

import asyncio
from collections.abc import Sequence
from typing import Any

from coserve.jobs.records import ConversationRecord
from coserve.jobs.sql.transaction import Transaction
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError
from coserve.server.http.responses import to_json
from coserve.server.responses.context import ResponsesContext
from coserve.server.stored.lookup import find_stored

Item = dict[str, Any]


async def find_conversation(
    context: ResponsesContext, tenant: str, id: str, *, param: str = "conversation_id"
) -> ConversationRecord:
    """Return a tenant's conversation.

    Raises:
        ApiError: There is none of this id.
    """
    missing = f"Conversation with id '{id}' not found."
    return await find_stored(
        context.jobs, id, lambda store: store.conversation(tenant, id), param=param, missing=missing
    )


async def items_of(
    context: ResponsesContext, tenant: str, id: str, *, param: str = "conversation_id"
) -> list[Item]:
    """Return all items of a conversation.

    Raises:
        ApiError: There is no conversation of this id.
    """

    def read(store: Transaction) -> list[Item] | None:
        return None if store.conversation(tenant, id) is None else store.conversation_items(id)

    missing = f"Conversation with id '{id}' not found."
    return await find_stored(context.jobs, id, read, param=param, missing=missing)


def check_new(items: Sequence[Item], known: Sequence[Item], *, param: str) -> None:
    """Check that items are not in a conversation yet.

    Raises:
        ApiError: One is; the message names it.
    """
    ids = {item["id"] for item in known}
    for item in items:
        if item["id"] in ids:
            raise ApiError(
                f"Duplicate item found with id {item['id']}.", param=param, code="duplicate_item"
            )
        ids.add(item["id"])


async def create_conversation(
    context: ResponsesContext, record: ConversationRecord, items: Sequence[Item]
) -> None:
    """Create a conversation with its first items."""

    def write() -> None:
        with context.jobs.store.write() as transaction:
            transaction.add_conversation(record)
            _add(context, transaction, record, items)

    await asyncio.to_thread(write)


async def extend_conversation(
    context: ResponsesContext, tenant: str, id: str, items: Sequence[Item]
) -> bool:
    """Add items to a conversation; return whether it exists.

    Raises:
        ApiError: An item is in it already.
    """
    check_texts(id, param="conversation_id")

    def write() -> bool:
        with context.jobs.store.write() as transaction:
            record = transaction.conversation(tenant, id)
            if record is not None:
                check_new(items, transaction.conversation_items(id), param="items")
                _add(context, transaction, record, items)
        return record is not None

    return await asyncio.to_thread(write)


async def label_conversation(
    context: ResponsesContext, tenant: str, id: str, metadata: dict[str, str]
) -> ConversationRecord | None:
    """Replace the metadata of a tenant's conversation; return it, or None if it does not exist."""
    check_texts(id, param="conversation_id")

    def write() -> ConversationRecord | None:
        with context.jobs.store.write() as transaction:
            if transaction.conversation(tenant, id) is not None:
                transaction.label_conversation(id, metadata)
            return transaction.conversation(tenant, id)

    return await asyncio.to_thread(write)


async def remove_conversation(context: ResponsesContext, tenant: str, id: str) -> bool:
    """Delete a tenant's conversation with its items; return whether it existed."""
    check_texts(id, param="conversation_id")

    def write() -> bool:
        with context.jobs.store.write() as transaction:
            record = transaction.conversation(tenant, id)
            if record is not None:
                transaction.remove_conversation(id)
        return record is not None

    return await asyncio.to_thread(write)


async def remove_item(
    context: ResponsesContext, tenant: str, id: str, item: str
) -> tuple[ConversationRecord | None, bool]:
    """Remove an item from a conversation.

    Returns:
        The conversation, None if it does not exist; and whether the item did.
    """
    check_texts(id, param="conversation_id")
    check_texts(item, param="item_id")

    def write() -> tuple[ConversationRecord | None, bool]:
        with context.jobs.store.write() as transaction:
            record = transaction.conversation(tenant, id)
            return record, record is not None and transaction.remove_conversation_item(id, item)

    return await asyncio.to_thread(write)


def _add(
    context: ResponsesContext,
    transaction: Transaction,
    record: ConversationRecord,
    items: Sequence[Item],
) -> None:
    sized = [(item, len(to_json(item))) for item in items]
    transaction.add_conversation_items(record, sized, most_bytes=context.max_bytes)
