"""Places for concurrent requests of batches, whose number may change."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable


class BatchPlaces:
    """Allocator of places; it belongs to one event loop.

    A free place goes to the tenant with the fewest places, and there to the request that has waited
    longest.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        """Begin with all places free.

        Args:
            most: Function that returns the current number of places.
        """
        self._most = most
        self._held: Counter[str] = Counter()  # places by tenant
        self._waiting: dict[
            str, deque[asyncio.Future[None]]
        ] = {}  # by tenant, the one that has waited longest first

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; `release` must follow."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self.grow()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given a place just now
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        """Give a place back; it is not given out while there are too many."""
        self._held[tenant] -= 1
        self.grow()

    def grow(self) -> None:
        """Give out places that have become available."""
        while self._waiting and self._held.total() < self._most():
            tenant = min(self._waiting, key=lambda name: self._held[name])
            place = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not place.done():  # of one that was cancelled meanwhile
                place.set_result(None)
                self._held[tenant] += 1
