"""Places for requests of batches that are under way at once, of which there may be more or fewer
later.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable


class BatchPlaces:
    """The places, and who waits for one: a free place goes to the tenant that has the fewest, and
    there to who has waited longest. Belongs to one event loop.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        """Begin with all places free; most: as many as there may be now."""
        self._most = most
        self._held: Counter[str] = Counter()  # places by tenant
        self._waiting: dict[
            str, deque[asyncio.Future[None]]
        ] = {}  # by tenant, the one that has waited longest first

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; `release` is to follow."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self.grow()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # given just now
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        """Give a place back; nobody gets it while there are more than there may be."""
        self._held[tenant] -= 1
        self.grow()

    def grow(self) -> None:
        """Give out places while there are fewer than there may be."""
        while self._waiting and self._held.total() < self._most():
            tenant = min(self._waiting, key=lambda name: self._held[name])
            place = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not place.done():  # of one that was cancelled meanwhile
                place.set_result(None)
                self._held[tenant] += 1
