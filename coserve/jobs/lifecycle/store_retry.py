"""When to try again what the store, or a disk, did not take: it may be full, or away."""

import asyncio
import logging
from collections.abc import Callable

from coserve.errors import CoserveError, DiskFullError, StoreError
from coserve.home import is_disk_full

_log = logging.getLogger(__name__)

_WAIT_S = 1.0


class StoreRetry:
    """Belongs to one event loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: told when it is time."""
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False

    @property
    def is_waiting(self) -> bool:
        """Whether it is too early."""
        return self._timer is not None

    def failed(self, error: CoserveError) -> None:
        """Something was not taken."""
        if not self._is_failing:
            _log.error("%s; it is tried again until it can be done", error)
        self._is_failing = True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WAIT_S, self._is_due)

    def worked(self) -> None:
        """All has been taken."""
        if self._is_failing:
            _log.warning("what waited for the store has been done")
        self._is_failing = False

    def close(self) -> None:
        """Nothing is tried later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_due(self) -> None:
        self._timer = None
        self._wake()


def store_error(error: StoreError | OSError) -> CoserveError:
    """As who asked for something is told."""
    if isinstance(error, StoreError):
        return error
    if is_disk_full(error):
        return DiskFullError(f"the disk is full, and nothing was changed: {error}")
    return StoreError(f"the disk cannot be used now: {error}")
