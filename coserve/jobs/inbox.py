"""What the engine has said and the store has not taken yet, in order."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from coserve.errors import CoserveError, StoreError
from coserve.jobs.machine import Answer, Gone
from coserve.jobs.report_writer import Report
from coserve.jobs.store_retry import store_error

_log = logging.getLogger(__name__)
Item = Report | Answer | Gone | Literal["ready"]


class Inbox:
    """Filled from any thread, emptied from one task.

    blocked: why the first item could not be taken in, when that was last tried.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self.blocked: CoserveError | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._items

    def put(self, item: Item) -> None:
        """The newest."""
        self._items.append(item)

    async def take_in(self, take: Callable[[Sequence[Item]], Awaitable[None]]) -> None:
        """Hand over all items, neighbouring reports together, until `take` raises StoreError or OSError: nothing of
        what it was given has been taken in then, and that comes first the next time. Any other error costs only the
        items that it was raised for.
        """
        self.blocked = None
        while self._items:
            items = self._take_next()
            try:
                await take(items)
            except (StoreError, OSError) as error:
                self._items.extendleft(reversed(items))
                self.blocked = store_error(error)
                return
            except Exception as error:  # the next job's fate must not hang on this one's
                _log.exception("a job's report could not be taken in: %s", error)

    def _take_next(self) -> list[Item]:
        """The first, or all reports at the beginning."""
        items = [self._items.popleft()]
        while isinstance(items[0], Report) and self._items and isinstance(self._items[0], Report):
            items.append(self._items.popleft())
        return items
