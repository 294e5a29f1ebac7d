"""The page pool: all of a device's spare memory in pages of one size, by number. Bookkeeping alone.

Requests take single pages, from the bottom; fine-tuning takes runs of neighbouring pages, from the
top, so that what it keeps lies in plain contiguous tensors.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import sub

from coserve.errors import BudgetError

# A page that nobody has, and which pages these are.
_FREE = b"\x00"
_IS_FREE = bytes([1]) + bytes(255)


class PageAllocator:
    """Pages by number. Questions: `num_free`, `can_take`; verbs: `take`, `take_runs`, `take_these`,
    `move`; inverses: `give_back`, `give_back_runs`. Runs come many at a time, since a pack has one
    for each part of the model.

    Invariant, held by `check_integrity`: every page is free or has one owner.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """page_bytes must be a multiple of 64, so that tensors in pages are aligned."""
        if num_pages < 1 or page_bytes < 1 or page_bytes % 64:
            raise BudgetError(
                f"a pool of {num_pages} pages of {page_bytes} bytes; pages are multiples of 64 "
                f"bytes"
            )
        self.num_pages, self.page_bytes = num_pages, page_bytes
        # A byte for each page, so that a run of some hundred is taken or given back at once: 0 if
        # it is free, otherwise the place of its owner among those that there ever were, counted
        # from 1.
        self._marks = bytearray(num_pages)
        self._mark_of: dict[str, int] = {}
        self.num_free = num_pages
        self.num_returned = 0  # pages that ever became free again
        self._num_by_owner: Counter[str] = Counter()

    def is_free(self, page: int) -> bool:
        return not self._marks[page]

    def can_take(self, num_pages: int) -> bool:
        return num_pages <= self.num_free

    def take(self, owner: str, num_pages: int) -> list[int]:
        """The lowest free pages; BudgetError, and nothing is taken, if there are too few."""
        if not self.can_take(num_pages):
            raise BudgetError(f"{num_pages} pages asked for, {self.num_free} are free")
        mark, pages, start = self._mark(owner), [], 0
        for _ in range(num_pages):
            start = self._marks.find(_FREE, start)
            self._marks[start] = mark
            pages.append(start)
        self._count(owner, num_pages)
        return pages

    def take_runs(self, owner: str, lengths: Sequence[int]) -> list[range]:
        """Runs of free neighbours of these lengths, each in turn the highest that there is, as far
        as there are.
        """
        marks, mark = self._marks, bytes([self._mark(owner)])
        num_pages, least = sum(lengths), min(filter(None, lengths), default=0)
        # No run lies above the highest of the shortest ones. Where there is room for all below it,
        # they come one below the other.
        top = marks.rfind(_FREE * least) + least
        if least and num_pages <= top and marks.startswith(_FREE * num_pages, top - num_pages):
            marks[top - num_pages : top] = mark * num_pages
            self._count(owner, num_pages)
            return list(runs_below(top, tuple(lengths)))
        runs, num_taken = [], 0
        for length in lengths:
            start = marks.rfind(_FREE * length) if length else 0
            if start < 0:
                break
            end = start + length
            marks[start:end] = mark * length
            runs.append(range(start, end))
            num_taken += length
        self._count(owner, num_taken)
        return runs

    def take_these(self, owner: str, run: range) -> None:
        """Pages that are free."""
        assert self._marks[run.start : run.stop] == _FREE * len(run), f"{run} is not all free"
        self._marks[run.start : run.stop] = bytes([self._mark(owner)]) * len(run)
        self._count(owner, len(run))

    def move(self, targets: Mapping[int, int]) -> None:
        """Pages that somebody has lie elsewhere now: where they were is free, and where they are
        was.
        """
        marks = self._marks
        for page, target in targets.items():
            assert marks[page] and not marks[target], f"page {page} cannot move to {target}"
            marks[target], marks[page] = marks[page], 0
        self.num_returned += len(targets)

    def free_flags(self) -> bytes:
        """Of every page, 1 if it is free and 0 if not."""
        return bytes(self._marks.translate(_IS_FREE))

    def longest_free_run(self) -> int:
        """How many free pages lie side by side at most."""
        return max(map(len, self._marks.translate(_IS_FREE).split(b"\x00")))

    def give_back(self, owner: str, pages: Sequence[int]) -> None:
        """The inverse for single pages, which must be the owner's."""
        marks, mark = self._marks, self._mark(owner)
        for page in pages:
            assert marks[page] == mark, f"page {page} is {self._owner(page)}'s, not {owner}'s"
            marks[page] = 0
        self._count(owner, -len(pages))

    def give_back_runs(self, owner: str, runs: Sequence[range]) -> None:
        """The inverse for runs, which must be the owner's."""
        marks, mark = self._marks, bytes([self._mark(owner)])
        num_pages = 0
        for run in runs:
            length = len(run)
            assert marks.startswith(mark * length, run.start), f"{run} is not all {owner}'s"
            marks[run.start : run.stop] = bytes(length)
            num_pages += length
        self._count(owner, -num_pages)

    def num_pages_by_owner(self) -> dict[str, int]:
        """How many pages each owner has."""
        return dict(+self._num_by_owner)

    def check_integrity(self) -> None:
        """Assert that the counts are those of the pages."""
        found = Counter(self._marks)
        assert found.pop(0, 0) == self.num_free
        assert {owner: found[mark] for owner, mark in self._mark_of.items() if found[mark]} == dict(
            +self._num_by_owner
        )

    def _owner(self, page: int) -> str | None:
        return next(
            (owner for owner, mark in self._mark_of.items() if mark == self._marks[page]), None
        )

    def _mark(self, owner: str) -> int:
        return self._mark_of.setdefault(owner, len(self._mark_of) + 1)

    def _count(self, owner: str, num_pages: int) -> None:
        """Pages go to an owner, or come back."""
        self.num_free -= num_pages
        self._num_by_owner[owner] += num_pages
        if num_pages < 0:
            self.num_returned -= num_pages


@lru_cache(maxsize=64)
def runs_below(top: int, lengths: tuple[int, ...]) -> tuple[range, ...]:
    """Runs of these lengths, the first right below a page and each next one below the one before.
    One pack after the other has the same.
    """
    return tuple(
        [range(start, end) for end, start in pairwise(accumulate(lengths, sub, initial=top))]
    )
