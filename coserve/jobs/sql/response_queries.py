"""Queries about responses of /v1/responses; each tenant keeps the newest that fit."""

import time
from collections.abc import Collection
from typing import Any

from sqlalchemy import delete, func, select, update

from coserve.jobs.records import ResponseRecord
from coserve.jobs.sql.queries import Queries, row_of
from coserve.jobs.sql.tables import ResponseTable

# Share of the limit that is freed in addition, so that the next addition finds room.
_ROOM_SHARE = 1 / 16
_UNFINISHED = ("queued", "in_progress")


class ResponseQueries(Queries):
    """The part of `Transaction` about responses."""

    def put_response(self, record: ResponseRecord, *, most_bytes: int) -> None:
        """Add a response, or replace the one of this id; the tenant's oldest responses make room
        for it.

        Args:
            record: Response to store.
            most_bytes: Limit of all responses of a tenant; this one is kept even if it is larger.
        """
        row = self._session.scalar(select(ResponseTable).where(ResponseTable.id == record.id))
        if row is None:
            self._session.add(row_of(ResponseTable, record))
        else:
            row.status, row.num_bytes, row.response = (
                record.status,
                record.num_bytes,
                record.response,
            )
        self._session.flush()
        mine = ResponseTable.tenant == record.tenant
        num_bytes = int(
            self._session.scalar(select(func.sum(ResponseTable.num_bytes)).where(mine)) or 0
        )
        if num_bytes <= most_bytes:
            return
        most_bytes -= int(_ROOM_SHARE * most_bytes)
        others = mine & (ResponseTable.id != record.id)
        oldest = (
            select(ResponseTable.seq, ResponseTable.num_bytes)
            .where(others)
            .order_by(ResponseTable.seq)
        )
        last = None
        for seq, size in self._session.execute(oldest):
            if num_bytes <= most_bytes:
                break
            last, num_bytes = seq, num_bytes - size
        if last is not None:
            self._execute(delete(ResponseTable).where(others, ResponseTable.seq <= last))

    def response(self, tenant: str, id: str) -> ResponseRecord | None:
        """Return a tenant's response; None if there is none, or it has expired."""
        alive = ResponseTable.expires_at > int(time.time())
        where = (ResponseTable.tenant == tenant, ResponseTable.id == id, alive)
        return self._one(ResponseRecord, select(ResponseTable).where(*where))

    def remove_response(self, tenant: str, id: str) -> bool:
        """Remove a response; return whether it existed."""
        return (
            self._execute(
                delete(ResponseTable).where(ResponseTable.tenant == tenant, ResponseTable.id == id)
            )
            > 0
        )

    def unfinished_responses(self) -> list[str]:
        """Return the ids of responses of every tenant that are not over."""
        return list(
            self._session.scalars(
                select(ResponseTable.id).where(ResponseTable.status.in_(_UNFINISHED))
            )
        )

    def end_unfinished_responses(self, ids: Collection[str], error: dict[str, Any]) -> None:
        """Let unfinished responses among these fail, and remove all expired responses."""
        self._execute(delete(ResponseTable).where(ResponseTable.expires_at <= int(time.time())))
        unfinished = select(ResponseTable).where(
            ResponseTable.id.in_(ids), ResponseTable.status.in_(_UNFINISHED)
        )
        for row in list(self._session.scalars(unfinished)):
            failed = {**row.response, "status": "failed", "error": error}
            change = update(ResponseTable).where(ResponseTable.id == row.id)
            self._execute(change.values(status="failed", response=failed))
