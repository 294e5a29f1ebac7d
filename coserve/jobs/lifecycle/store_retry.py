"""Retries of writes that the store or a disk refused, because it is full or cannot be reached."""

import asyncio
import logging
from collections.abc import Callable

from coserve.errors import CoserveError, DiskFullError, StoreError
from coserve.home import is_disk_full

_log = logging.getLogger(__name__)

_WAIT_S = 1.0


class StoreRetry:
    """A timer for the next attempt. Belongs to one event loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the next attempt is due."""
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False

    @property
    def is_waiting(self) -> bool:
        """Return whether the next attempt is not due yet."""
        return self._timer is not None

    def failed(self, error: CoserveError) -> None:
        """Note a failed attempt: log the first one, and schedule the next."""
        if not self._is_failing:
            _log.error("%s; trying again until it succeeds", error)
        self._is_failing = True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WAIT_S, self._is_due)

    def worked(self) -> None:
        """Note that everything has been written."""
        if self._is_failing:
            _log.warning("the store works again: all waiting changes are written")
        self._is_failing = False

    def close(self) -> None:
        """Cancel the next attempt."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_due(self) -> None:
        self._timer = None
        self._wake()


def store_error(error: StoreError | OSError) -> CoserveError:
    """Return the error of a store or a disk as a client gets to see it."""
    if isinstance(error, StoreError):
        return error
    if is_disk_full(error):
        return DiskFullError(f"the disk is full, and nothing was changed: {error}")
    return StoreError(f"the disk cannot be used now: {error}")
