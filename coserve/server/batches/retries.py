"""Retries of blocking work for batches while a disk or the database is away or full."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from coserve.errors import StoreError
from coserve.home import is_disk_full

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Seconds before something is tried again that could not be done, doubled each time.
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0


async def until_done(do: Callable[..., _T], *arguments: Any, what: str = "a batch") -> _T:
    """Call a function in a thread, again and again while a disk or the database is away or full.

    If this is cancelled, it ends after the thread, so that a write in progress is complete.

    Args:
        do: The function.
        arguments: Its arguments.
        what: What waits meanwhile, for the log.
    """
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return await _to_its_end(do, *arguments)
        except StoreError as error:
            _log.warning("%s waits: %s", what, error)
        except OSError as error:
            if not is_disk_full(error):
                raise
            _log.warning("%s waits: the disk is full", what)
        await asyncio.sleep(wait_s)
        wait_s = min(MAX_WAIT_S, 2 * wait_s)


async def _to_its_end(do: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread, and do not end before the thread does."""
    thread = asyncio.create_task(asyncio.to_thread(do, *arguments))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with suppress(asyncio.CancelledError):  # of further cancellations
                await asyncio.wait([thread])
        if not thread.cancelled() and (error := thread.exception()) is not None:
            _log.warning("a batch was stopped, and this failed meanwhile: %s", error)
        raise
