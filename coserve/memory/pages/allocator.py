"""Allocator of pages by number: all of a device's spare memory in pages of one size. Bookkeeping
alone.

Requests take single pages, from the bottom. Fine-tuning takes runs of neighbouring pages, from the
top, so that each group of its tensors lies in plain contiguous memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import sub

from coserve.errors import BudgetError

# Mark of a free page, and a table that maps marks to 1 for free pages and 0 for others.
_FREE = b"\x00"
_IS_FREE = bytes([1]) + bytes(255)


class PageAllocator:
    """Allocator of numbered pages, each of which is free or has one owner.

    Questions: `num_free`, `can_take`; verbs: `take`, `take_runs`, `take_these`, `move`; inverses:
    `give_back`, `give_back_runs`. Runs come many at a time, since a pack has one for each part of
    the model. `check_integrity` checks the invariant.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """Begin with all pages free.

        Args:
            num_pages: Number of pages.
            page_bytes: Size of a page: a multiple of 64, so that tensors in pages are aligned.

        Raises:
            BudgetError: The numbers make no pool.
        """
        if num_pages < 1 or page_bytes < 1 or page_bytes % 64:
            raise BudgetError(
                f"a pool of {num_pages} pages of {page_bytes} bytes; pages are multiples of 64 "
                "bytes"
            )
        self.num_pages, self.page_bytes = num_pages, page_bytes
        # A byte for each page, so that a run of some hundred is found, taken and freed by calls
        # that run in C: 0 if the page is free, otherwise its owner's number, from 1.
        self._marks = bytearray(num_pages)
        self._mark_of: dict[str, int] = {}
        self.num_free = num_pages
        """Number of free pages."""
        self.num_returned = 0
        """Number of pages that ever became free again."""
        self._num_by_owner: Counter[str] = Counter()

    def is_free(self, page: int) -> bool:
        return not self._marks[page]

    def can_take(self, num_pages: int) -> bool:
        return num_pages <= self.num_free

    def take(self, owner: str, num_pages: int) -> list[int]:
        """Take the lowest free pages, and return their numbers.

        Raises:
            BudgetError: Too few pages are free; none is taken.
        """
        if not self.can_take(num_pages):
            raise BudgetError(f"{num_pages} pages asked for, {self.num_free} are free")
        mark, pages, start = self._mark(owner), [], 0
        for _ in range(num_pages):
            # Each search goes on from the page found last: below it no page is free any more.
            start = self._marks.find(_FREE, start)
            self._marks[start] = mark
            pages.append(start)
        self._count(owner, num_pages)
        return pages

    def take_runs(self, owner: str, lengths: Sequence[int]) -> list[range]:
        """Take runs of free neighbours of these lengths, each the highest that there is.

        Returns:
            The runs in order; those after the first one for which there is no room are missing.
        """
        marks, mark = self._marks, bytes([self._mark(owner)])
        num_pages, least = sum(lengths), min(filter(None, lengths), default=0)
        # The usual case: all runs fit below one another where the first one lies. No run can lie
        # above the highest run of the shortest length, so nothing higher is missed.
        top = marks.rfind(_FREE * least) + least
        if least and num_pages <= top and marks.startswith(_FREE * num_pages, top - num_pages):
            marks[top - num_pages : top] = mark * num_pages
            self._count(owner, num_pages)
            return list(runs_below(top, tuple(lengths)))
        # The general case: each run by itself, wherever there is room.
        runs, num_taken = [], 0
        for length in lengths:
            # A group without tensors has an empty run, which lies anywhere.
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
        """Take a run of pages, all of which are free."""
        assert self._marks[run.start : run.stop] == _FREE * len(run), f"{run} is not all free"
        self._marks[run.start : run.stop] = bytes([self._mark(owner)]) * len(run)
        self._count(owner, len(run))

    def move(self, targets: Mapping[int, int]) -> None:
        """Give the owners of pages other pages, which are free, in their place.

        Args:
            targets: New page by old page.
        """
        marks = self._marks
        for page, target in targets.items():
            assert marks[page] and not marks[target], f"page {page} cannot move to {target}"
            marks[target], marks[page] = marks[page], 0
        # The old pages count as returned, so that searches that failed are made again.
        self.num_returned += len(targets)

    def free_flags(self) -> bytes:
        """Return a byte for each page: 1 if it is free, 0 if not."""
        return bytes(self._marks.translate(_IS_FREE))

    def longest_free_run(self) -> int:
        """Return the largest number of free pages side by side."""
        return max(map(len, self._marks.translate(_IS_FREE).split(b"\x00")))

    def give_back(self, owner: str, pages: Sequence[int]) -> None:
        """Free single pages of an owner."""
        marks, mark = self._marks, self._mark(owner)
        for page in pages:
            assert marks[page] == mark, f"page {page} is {self._owner(page)}'s, not {owner}'s"
            marks[page] = 0
        self._count(owner, -len(pages))

    def give_back_runs(self, owner: str, runs: Sequence[range]) -> None:
        """Free runs of an owner."""
        marks, mark = self._marks, bytes([self._mark(owner)])
        num_pages = 0
        for run in runs:
            length = len(run)
            assert marks.startswith(mark * length, run.start), f"{run} is not all {owner}'s"
            marks[run.start : run.stop] = bytes(length)
            num_pages += length
        self._count(owner, -num_pages)

    def num_pages_by_owner(self) -> dict[str, int]:
        """Return the number of pages of each owner that has some."""
        # The unary plus drops owners whose count is zero.
        return dict(+self._num_by_owner)

    def check_integrity(self) -> None:
        """Assert that the counts are those of the pages."""
        counts = Counter(self._marks)
        assert counts.pop(0, 0) == self.num_free
        by_owner = {owner: counts[mark] for owner, mark in self._mark_of.items() if counts[mark]}
        assert by_owner == self.num_pages_by_owner()

    def _owner(self, page: int) -> str | None:
        return next(
            (owner for owner, mark in self._mark_of.items() if mark == self._marks[page]), None
        )

    def _mark(self, owner: str) -> int:
        return self._mark_of.setdefault(owner, len(self._mark_of) + 1)

    def _count(self, owner: str, num_pages: int) -> None:
        """Note that an owner has more pages, or fewer."""
        self.num_free -= num_pages
        self._num_by_owner[owner] += num_pages
        if num_pages < 0:
            self.num_returned -= num_pages


@lru_cache(maxsize=64)
def runs_below(top: int, lengths: tuple[int, ...]) -> tuple[range, ...]:
    """Return runs of these lengths, each right below the one before; the first ends at `top`.

    Packs of one job mostly have the same, so results are cached.
    """
    return tuple(
        [range(start, end) for end, start in pairwise(accumulate(lengths, sub, initial=top))]
    )
