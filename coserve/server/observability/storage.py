"""State of the disk and the database that hold files, jobs, batches and answers.

The log and /v1/status show it.
"""

import asyncio
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from coserve.errors import DiskFullError, StoreError
from coserve.jobs.sql.store import Store

_log = logging.getLogger(__name__)

# Each look writes to the store.
_FRESH_S = 2.0
# Message to clients, which does not reveal where the database is.
_AWAY = "the database cannot be used now"


class Storage:
    """State of the store and of the home's disk; it belongs to one event loop."""

    def __init__(self, store: Store, home: Path) -> None:
        self._store, self._home = store, home
        self._problem: str | None = None
        self._found: dict[str, Any] = {}
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()

    async def check(self) -> dict[str, Any]:
        """Try to write, log a change, and return what /v1/status shows.

        A result is reused for a while, and concurrent callers share one check.
        """
        async with self._looking:
            if time.monotonic() - self._looked_s >= _FRESH_S:
                problem, free_bytes = await asyncio.to_thread(self._look)
                self._log_change(problem)
                self._found = {
                    "writable": problem is None,
                    "problem": problem,
                    "free_bytes": free_bytes,
                }
                self._looked_s = time.monotonic()
            return self._found

    def _log_change(self, problem: str | None) -> None:
        """Log that writing has become impossible, or possible again."""
        if problem is not None and self._problem is None:
            _log.error(
                "%s: until there is, requests are answered and all that is kept can be read, but "
                "no files, jobs, batches or answers are kept, and jobs and batches wait",
                problem,
            )
        elif problem is None and self._problem is not None:
            _log.warning("the disk has free space again")
        self._problem = problem

    def _look(self) -> tuple[str | None, int | None]:
        """Return what is wrong, and the free bytes of the home's disk. Blocks."""
        try:
            free_bytes = shutil.disk_usage(self._home).free
        except OSError as error:
            return f"the home cannot be read: {error.strerror or error}", None
        try:
            self._store.check_room()
        except DiskFullError:
            return "the database's disk is full", free_bytes
        except StoreError as error:
            _log.warning("the store: %s", error)
            return _AWAY, free_bytes
        return (None if free_bytes else "the home's disk is full"), free_bytes
