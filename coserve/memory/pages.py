"""The page pool: all of a device's spare memory in pages of one size, by number. Bookkeeping alone.

Requests take single pages, from the bottom; fine-tuning takes runs of neighbouring pages, from the top, so that what it
keeps lies in plain contiguous tensors.
"""

from collections import Counter
from collections.abc import Sequence

from coserve.errors import BudgetError

# A page that nobody has, and which pages these are.
_FREE = b"\x00"
_IS_FREE = bytes([1]) + bytes(255)


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
        # A byte for each page, so that a run of some hundred is taken or given back at once: 0 if it is free, otherwise
        # the place of its owner among those that there ever were, counted from 1.
        self._marks = bytearray(num_pages)
        self._owners: list[str] = []
        self._num_free = num_pages
        self.num_returned = 0  # pages that were ever given back
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
        mark, pages, start = self._mark(owner), [], 0
        for _ in range(num_pages):
            start = self._marks.find(_FREE, start)
            self._marks[start] = mark
            pages.append(start)
        self._count(owner, num_pages)
        return pages

    def take_run(self, owner: str, num_pages: int) -> range | None:
        """The highest run of this many free neighbours, or None if there is none."""
        start = self._marks.rfind(_FREE * num_pages) if num_pages else 0
        if start < 0:
            return None
        run = range(start, start + num_pages)
        self.take_these(owner, run)
        return run

    def take_these(self, owner: str, run: range) -> None:
        """Pages that are free."""
        assert self._marks[run.start : run.stop] == _FREE * len(run), f"{run} is not all free"
        self._marks[run.start : run.stop] = bytes([self._mark(owner)]) * len(run)
        self._count(owner, len(run))

    def free_flags(self) -> bytes:
        """Of every page, 1 if it is free and 0 if not."""
        return bytes(self._marks.translate(_IS_FREE))

    def longest_free_run(self) -> int:
        """How many free pages lie side by side at most."""
        return max(map(len, self._marks.translate(_IS_FREE).split(b"\x00")))

    def give_back(self, owner: str, pages: Sequence[int]) -> None:
        """The inverse of all of these; the pages must be the owner's."""
        mark = self._mark(owner)
        if isinstance(pages, range):
            marks = self._marks[pages.start : pages.stop]
            assert marks == bytes([mark]) * len(pages), f"{pages} is not all {owner}'s"
            self._marks[pages.start : pages.stop] = bytes(len(pages))
        else:
            for page in pages:
                assert self._marks[page] == mark, f"page {page} is {self._owner(page)}'s, not {owner}'s"
                self._marks[page] = 0
        self._count(owner, -len(pages))
        self.num_returned += len(pages)

    def num_pages_by_owner(self) -> dict[str, int]:
        """How many pages each owner has."""
        return dict(+self._num_by_owner)

    def check_integrity(self) -> None:
        """Assert that the counts are those of the pages."""
        found = Counter(self._marks)
        assert found.pop(0, 0) == self._num_free
        assert {self._owners[mark - 1]: number for mark, number in found.items()} == dict(+self._num_by_owner)

    def _owner(self, page: int) -> str | None:
        mark = self._marks[page]
        return self._owners[mark - 1] if mark else None

    def _mark(self, owner: str) -> int:
        if owner not in self._owners:
            self._owners.append(owner)
        return self._owners.index(owner) + 1

    def _count(self, owner: str, num_pages: int) -> None:
        """Pages go to an owner, or come back."""
        self._num_free -= num_pages
        self._num_by_owner[owner] += num_pages
