"""Base of all queries: conversion between rows and records, and pages."""

from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import Session

from coserve.errors import JobError
from coserve.jobs.records import Page

Record = TypeVar("Record")
# SQLAlchemy reserves the name "metadata".
_RENAMED = {"metadata": "labels"}


def anything(row: Any) -> bool:
    """Return True: every row is selected."""
    return True


class Queries:
    """Queries within one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _one(self, kind: type[Record], query: Select[Any]) -> Record | None:
        row = self._session.scalar(query)
        return None if row is None else record_of(kind, row)

    def _all(self, kind: type[Record], query: Select[Any]) -> tuple[Record, ...]:
        return tuple(record_of(kind, row) for row in self._session.scalars(query))

    def _page(
        self,
        kind: type[Any],
        table: type[Any],
        tenant: str,
        query: Select[Any],
        after: str | None,
        limit: int,
        newest_first: bool,
        is_asked_for: Callable[[Any], bool] = anything,
    ) -> Page:
        if after is not None:
            # The filters of the page apply to `after`, too.
            place = query.with_only_columns(table.seq).where(
                table.tenant == tenant, table.id == after
            )
            seq = self._session.scalar(place)
            if seq is None:
                raise JobError(f"after names {after!r}, which is not there", param="after")
            query = query.where(table.seq < seq if newest_first else table.seq > seq)
        query = query.order_by(table.seq.desc() if newest_first else table.seq)
        # One row more tells whether there is a next page; a filter in Python has no limit here.
        if is_asked_for is anything:
            query = query.limit(limit + 1)
        rows = (row for row in self._session.scalars(query) if is_asked_for(row))
        items = [record_of(kind, row) for row in islice(rows, limit + 1)]
        return Page(items=tuple(items[:limit]), has_more=len(items) > limit)

    def _execute(self, statement: Any) -> int:
        # Bulk statements bypass the session: write pending rows first, and reload rows later.
        self._session.flush()
        result: Any = self._session.execute(statement.execution_options(synchronize_session=False))
        self._session.expire_all()
        return int(result.rowcount)


def _stored(kind: Any) -> dict[str, str]:
    """Return the column of each field of a record."""
    names = [each.name for each in fields(kind) if each.metadata.get("stored", True)]
    return {name: _RENAMED.get(name, name) for name in names}


def record_of(kind: type[Record], row: Any) -> Record:
    """Return the record that a row holds."""
    return kind(**{name: getattr(row, column) for name, column in _stored(kind).items()})


def row_of(table: type[Any], record: Any) -> Any:
    """Return a row that holds a record."""
    return table(**{column: getattr(record, name) for name, column in _stored(record).items()})
