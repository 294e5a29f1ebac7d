"""Lookup of stored records by an id that a client gives."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from coserve.jobs.manager import JobManager
from coserve.jobs.sql.transaction import Transaction
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import not_found

Record = TypeVar("Record")


async def find_stored(
    jobs: JobManager,
    id: str,
    question: Callable[[Transaction], Record | None],
    *,
    param: str,
    missing: str,
) -> Record:
    """Return the record of an id.

    Args:
        jobs: Manager whose store is read.
        id: The id, as the client gave it.
        question: Query that returns the record or None; it runs in a thread.
        param: Field or part of the path in which the client gave the id.
        missing: Message of the error if there is no such record.

    Raises:
        ApiError: There is no such record, or the id is not a text that the store could hold.
    """
    check_texts(id, param=param)

    def read() -> Record | None:
        with jobs.store.read() as transaction:
            return question(transaction)

    record = await asyncio.to_thread(read)
    if record is None:
        raise not_found(missing, param=param)
    return record
