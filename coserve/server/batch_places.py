"""Places for requests of batches that are under way at once, of which there may be more or fewer later."""

import asyncio
from collections.abc import Callable


class BatchPlaces(asyncio.Semaphore):
    """Who has waited longest gets the next one. Belongs to one event loop."""

    def __init__(self, most: Callable[[], int]) -> None:
        """most: as many as there may be now."""
        self._most, self._number = most, most()
        super().__init__(self._number)

    def release(self) -> None:
        """One is given back; nobody gets it while there are more than there may be."""
        self._number -= 1
        self.grow()

    def grow(self) -> None:
        """Make as many as there may be."""
        while self._number < self._most():
            self._number += 1
            super().release()
