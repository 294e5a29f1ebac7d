"""A few places that tenants share fairly: none waits long because of the load of others."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TooManyWaitError(Exception):
    """A tenant has too many turns waiting, or has waited too long."""


class FairTurns:
    """Allocator of a few places; it belongs to the event loop.

    A tenant cannot hold all places, so that one is left for a tenant that has none. Of waiting
    tenants, the one with the fewest running turns, and then the fewest seconds used, is next. A new
    tenant starts with the fewest seconds of any other, so that idling saves up no credit.
    """

    def __init__(self, num_places: int, *, max_waiting: int, max_wait_s: float) -> None:
        """Begin with all places free.

        Args:
            num_places: Number of places.
            max_waiting: Maximum number of waiting turns per tenant.
            max_wait_s: Time after which a waiting turn fails.
        """
        self._num_places, self._max_waiting, self._max_wait_s = num_places, max_waiting, max_wait_s
        self._max_of_tenant = max(1, num_places - 1)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._used_s: dict[str, float] = {}  # of tenants that wait or run

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place.

        Raises:
            TooManyWaitError: No place becomes free soon.
        """
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
        # The place was granted just before the wait ended: pass it on.
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
        """Forget a tenant that has no turn waiting or running."""
        if not self._waiting.get(tenant) and not self._running[tenant]:
            for known in (self._waiting, self._used_s, self._running):
                known.pop(tenant, None)
