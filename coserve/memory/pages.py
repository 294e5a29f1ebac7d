"""The page pool: all of a device's spare memory in pages of one size, by number. Bookkeeping alone.

Requests take single pages, from the bottom; fine-tuning takes runs of neighbouring pages, from the top, so that what it
keeps lies in plain contiguous tensors.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from coserve.errors import BudgetError

_FREE, _TAKEN = b"\x01", b"\x00"
_FREE_BYTE, _TAKEN_BYTE = _FREE[0], _TAKEN[0]


class PagePool:
    """Pages by number. Questions: `num_free`, `can_take`; verbs: `take`, `take_run`, `take_these`; inverse:
    `give_back`.

    Invariant, held by `check_integrity`: every page is free or has one owner.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """page_bytes must be a multiple of 64, so that tensors in pages are aligned."""
        if num_pages < 1 or page_bytes < 1 or page_bytes % 64:
            raise BudgetError(f"a pool of {num_pages} pages of {page_bytes} bytes; pages are multiples of 64 bytes")
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self._free = bytearray(_FREE * num_pages)
        self._num_free = num_pages
        self.num_returned = 0  # pages that were ever given back
        self._owner: dict[int, str] = {}
        self._num_by_owner: Counter[str] = Counter()

    @property
    def num_free(self) -> int:
        return self._num_free

    def can_take(self, num_pages: int) -> bool:
        return num_pages <= self._num_free

    def take(self, owner: str, num_pages: int) -> list[int]:
        """The lowest free pages; BudgetError, and nothing is taken, if there are too few."""
        if not self.can_take(num_pages):
            raise BudgetError(f"{num_pages} pages asked for, {self._num_free} are free")
        pages, start = [], 0
        for _ in range(num_pages):
            start = self._free.find(_FREE, start)
            pages.append(start)
            start += 1
        self._lend(owner, pages)
        return pages

    def take_run(self, owner: str, num_pages: int) -> range | None:
        """The highest run of this many free neighbours, or None if there is none."""
        start = self._free.rfind(_FREE * num_pages) if num_pages else 0
        if start < 0:
            return None
        run = range(start, start + num_pages)
        self._lend(owner, run)
        return run

    def take_these(self, owner: str, run: range) -> None:
        """Pages that are free."""
        assert self._free[run.start : run.stop] == _FREE * len(run), f"{run} is not all free"
        self._lend(owner, run)

    def free_flags(self) -> bytes:
        """Of every page, 1 if it is free and 0 if not."""
        return bytes(self._free)

    def longest_free_run(self) -> int:
        """How many free pages lie side by side at most."""
        return max(map(len, self._free.split(_TAKEN)))

    def give_back(self, owner: str, pages: Iterable[int]) -> None:
        """The inverse of both; the pages must be the owner's."""
        owners, free = self._owner, self._free
        for page in pages:
            assert owners.get(page) == owner, f"page {page} is {owners.get(page)}'s, not {owner}'s"
            del owners[page]
            free[page] = _FREE_BYTE
            self._num_free += 1
            self._num_by_owner[owner] -= 1
            self.num_returned += 1

    def num_pages_by_owner(self) -> dict[str, int]:
        """How many pages each owner has."""
        return dict(+self._num_by_owner)

    def check_integrity(self) -> None:
        """Assert that free and owned pages are the pool, and apart."""
        free = {page for page in range(self.num_pages) if self._free[page : page + 1] == _FREE}
        assert len(free) == self._num_free
        assert free.isdisjoint(self._owner)
        assert len(free) + len(self._owner) == self.num_pages
        assert +self._num_by_owner == Counter(self._owner.values())

    def _lend(self, owner: str, pages: Sequence[int]) -> None:
        for page in pages:
            self._free[page] = _TAKEN_BYTE
        self._owner.update(dict.fromkeys(pages, owner))
        self._num_free -= len(pages)
        self._num_by_owner[owner] += len(pages)
