"""What routes look up in the store by an id that a client gives."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from coserve.jobs.sql.transaction import Transaction
from coserve.server.bodies.texts import check_texts
from coserve.server.context import ServerContext
from coserve.server.errors import not_found

Record = TypeVar("Record")


async def find_stored(
    context: ServerContext,
    id: str,
    question: Callable[[Transaction], Record | None],
    *,
    param: str,
    missing: str,
) -> Record:
    """What the store knows of this id.

    Args:
        question: what of the store to ask; it runs on a thread of its own.
        param: where the client gave the id.
        missing: what to say if there is no such thing.

    Raises:
        ApiError: the store answers None, or the id is no text that it could know.
    """
    check_texts(id, param=param)

    def read() -> Record | None:
        with context.jobs.store.read() as transaction:
            return question(transaction)

    record = await asyncio.to_thread(read)
    if record is None:
        raise not_found(missing, param=param)
    return record
