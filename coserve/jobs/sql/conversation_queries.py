"""Queries about conversations of /v1/conversations; each tenant keeps those used last that fit."""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select, update

from coserve.jobs.records import ConversationRecord
from coserve.jobs.sql.queries import Queries, row_of
from coserve.jobs.sql.tables import ConversationItemTable, ConversationTable

# Share of the limit that is freed in addition, so that the next addition finds room.
_ROOM_SHARE = 1 / 16


class ConversationQueries(Queries):
    """The part of `Transaction` about conversations."""

    def add_conversation(self, record: ConversationRecord) -> None:
        self._session.add(row_of(ConversationTable, record))

    def conversation(self, tenant: str, id: str) -> ConversationRecord | None:
        """Return a tenant's conversation; None if there is none."""
        where = (ConversationTable.tenant == tenant, ConversationTable.id == id)
        return self._one(ConversationRecord, select(ConversationTable).where(*where))

    def label_conversation(self, id: str, metadata: dict[str, str]) -> None:
        """Replace the metadata of a conversation."""
        self._execute(
            update(ConversationTable).where(ConversationTable.id == id).values(labels=metadata)
        )

    def remove_conversation(self, id: str) -> None:
        """Remove a conversation with its items."""
        self._execute(delete(ConversationItemTable).where(ConversationItemTable.conversation == id))
        self._execute(delete(ConversationTable).where(ConversationTable.id == id))

    def conversation_items(self, id: str) -> list[dict[str, Any]]:
        """Return the items of a conversation, in order."""
        mine = ConversationItemTable.conversation == id
        return list(
            self._session.scalars(
                select(ConversationItemTable.item).where(mine).order_by(ConversationItemTable.seq)
            )
        )

    def add_conversation_items(
        self,
        conversation: ConversationRecord,
        items: Sequence[tuple[dict[str, Any], int]],
        *,
        most_bytes: int,
    ) -> None:
        """Append items to a conversation; the tenant's least recently used conversations make room
        for them.

        Args:
            conversation: Conversation to extend.
            items: Items with new ids, each with its size in bytes.
            most_bytes: Limit of all conversations of a tenant; this one is kept even if it is
                larger.
        """
        for item, num_bytes in items:
            more = {
                "id": item["id"],
                "conversation": conversation.id,
                "num_bytes": num_bytes,
                "item": item,
            }
            self._session.add(ConversationItemTable(**more))
        self._resize(conversation.id, used_at=int(time.time()))
        mine = ConversationTable.tenant == conversation.tenant
        num_bytes = int(
            self._session.scalar(select(func.sum(ConversationTable.num_bytes)).where(mine)) or 0
        )
        if num_bytes <= most_bytes:
            return
        most_bytes -= int(_ROOM_SHARE * most_bytes)
        others = select(ConversationTable.id, ConversationTable.num_bytes).where(
            mine, ConversationTable.id != conversation.id
        )
        for id, size in self._session.execute(
            others.order_by(ConversationTable.used_at, ConversationTable.seq)
        ).all():
            if num_bytes <= most_bytes:
                break
            self.remove_conversation(id)
            num_bytes -= size

    def remove_conversation_item(self, conversation: str, id: str) -> bool:
        """Remove an item; return whether it existed."""
        where = (ConversationItemTable.conversation == conversation, ConversationItemTable.id == id)
        is_removed = self._execute(delete(ConversationItemTable).where(*where)) > 0
        self._resize(conversation)
        return is_removed

    def _resize(self, id: str, **more: int) -> None:
        self._session.flush()
        mine = ConversationItemTable.conversation == id
        num_bytes = int(
            self._session.scalar(select(func.sum(ConversationItemTable.num_bytes)).where(mine)) or 0
        )
        change = update(ConversationTable).where(ConversationTable.id == id)
        self._execute(change.values(num_bytes=num_bytes, **more))
