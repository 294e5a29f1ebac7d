"""Places that tenants share: each gets one soon, whatever the others ask for."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TooManyWaitError(Exception):
    """A tenant has too much waiting already, or has waited too long."""


class FairTurns:
    """Gives out a few places; belongs to the event loop.

    No tenant has the last free place beside others of its own, so that one that has none finds it.
    Of those that wait, the tenant that has used the fewest seconds is next; one that comes anew
    starts with the fewest that another has, so that idling saves up no credit.
    """

    def __init__(self, num_places: int, *, max_waiting: int, max_wait_s: float) -> None:
        """max_waiting: turns of one tenant that may wait at once."""
        self._num_places, self._max_waiting, self._max_wait_s = num_places, max_waiting, max_wait_s
        self._max_of_tenant = max(1, num_places - 1)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._used_s: dict[str, float] = {}  # of tenants that wait or run

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place; TooManyWaitError if there is none soon."""
        await self._acquire(tenant)
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._used_s[tenant] += time.monotonic() - begin_s
            self._release(tenant)

    async def _acquire(self, tenant: str) -> None:
        self._used_s.setdefault(tenant, min(self._used_s.values(), default=0.0))
        if self._may_run(tenant):
            self._running[tenant] += 1
            return
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._max_waiting:
            raise TooManyWaitError
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(granted)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except BaseException as error:
            self._forget(tenant, granted)
            if isinstance(error, TimeoutError):
                raise TooManyWaitError from None
            raise

    def _may_run(self, tenant: str) -> bool:
        return (
            self._running.total() < self._num_places and self._running[tenant] < self._max_of_tenant
        )

    def _forget(self, tenant: str, granted: "asyncio.Future[None]") -> None:
        """Give up a turn that was waited for."""
        if granted.done() and not granted.cancelled():
            self._release(tenant)
            return
        waiting = self._waiting.get(tenant)
        if waiting is not None and granted in waiting:
            waiting.remove(granted)
        self._tidy(tenant)

    def _release(self, tenant: str) -> None:
        self._running[tenant] -= 1
        while ready := [
            each for each, turns in self._waiting.items() if turns and self._may_run(each)
        ]:
            following = min(ready, key=lambda each: (self._running[each], self._used_s[each]))
            granted = self._waiting[following].popleft()
            if not granted.done():
                self._running[following] += 1
                granted.set_result(None)
        self._tidy(tenant)

    def _tidy(self, tenant: str) -> None:
        """Forget a tenant of which nothing waits or runs."""
        if not self._waiting.get(tenant) and not self._running[tenant]:
            for known in (self._waiting, self._used_s, self._running):
                known.pop(tenant, None)
