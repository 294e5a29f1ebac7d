"""Where runs of neighbouring pages can be had: as few pages of requests moved as that takes, and
then as few known prefixes forgotten. Bookkeeping alone.

Costs of all runs of one length come from one pass over the pool; to take a run, then, changes only
the costs of those that overlap with it. So a pack of many groups costs as many passes as its groups
have different lengths.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from operator import sub

# Runs whose lowest cost is kept together: about the root of the number of pages.
_CHUNK = 256


class RunSearch:
    """The pages of a pool at one moment: free, evictable, movable, or in use for good."""

    def __init__(
        self, free_flags: bytes, evictable: Collection[int], movable: Collection[int] = ()
    ) -> None:
        """free_flags: of every page, 1 if it is free. evictable: pages in use that may be had at a
        cost of 1 each. movable: pages whose content can lie elsewhere; one costs more than any run
        without.
        """
        move = 1 + len(free_flags)
        # No run without a page that cannot be had costs as much.
        self._taken = move * move
        costs = [0 if free else self._taken for free in free_flags]
        for page in evictable:
            costs[page] = 1
        for page in movable:
            costs[page] = move
        # Of the pages before each.
        self._sums = [0, *accumulate(costs)]

    def place(self, lengths: Sequence[int]) -> list[range]:
        """Runs of these lengths, each in turn where it costs least, of equal ones the highest; as
        far as there are.
        """
        windows = {
            length: _Windows(self._sums, length, self._taken) for length in set(lengths) if length
        }
        runs: list[range] = []
        for length in lengths:
            start = windows[length].best() if length else 0
            if start is None:
                break
            run = range(start, start + length)
            runs.append(run)
            for each in windows.values() if length else ():
                each.take(run)
        return runs

    def place_together(self, lengths: Sequence[int]) -> list[range]:
        """The same, as one run in parts; none if there is no such run."""
        whole = self.place([sum(lengths)])
        ends = list(accumulate(lengths, initial=whole[0].start)) if whole else []
        return [range(start, end) for start, end in pairwise(ends)]


class _Windows:
    """All runs of one length by cost, the highest first."""

    def __init__(self, sums: Sequence[int], length: int, taken: int) -> None:
        """taken: what a page that cannot be had costs, or more."""
        self._length, self._taken, self._last = length, taken, len(sums) - 1 - length
        self._costs: list[int] = list(map(sub, sums[length:], sums))
        self._costs.reverse()
        self._lowest = [self._lowest_in(start) for start in range(0, len(self._costs), _CHUNK)]

    def best(self) -> int | None:
        """The first page of the cheapest run; None if there is none."""
        cost = min(self._lowest, default=self._taken)
        if cost >= self._taken:
            return None
        return self._last - self._costs.index(cost, self._lowest.index(cost) * _CHUNK)

    def take(self, run: range) -> None:
        """No run that overlaps with this one can be had any more."""
        first, end = (
            max(0, self._last - run.stop + 1),
            min(len(self._costs), self._last - run.start + self._length),
        )
        if first >= end:
            return
        self._costs[first:end] = [self._taken] * (end - first)
        for chunk in range(first // _CHUNK, (end - 1) // _CHUNK + 1):
            self._lowest[chunk] = self._lowest_in(chunk * _CHUNK)

    def _lowest_in(self, start: int) -> int:
        return min(self._costs[start : start + _CHUNK])
