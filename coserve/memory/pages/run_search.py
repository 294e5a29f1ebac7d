"""Search for runs of neighbouring pages: with as few pages of requests moved as that takes, and
then as few known prefixes forgotten. Bookkeeping alone.

The costs of all runs of one length come from one pass over the pool; taking a run then changes only
the costs of those that overlap with it. So a pack of many groups costs as many passes as its groups
have different lengths.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from operator import sub

# Runs whose lowest cost is kept as one number, so that the cheapest run is found, and a run taken,
# without looking at all of them: about the root of the number of pages.
_CHUNK = 256


class RunSearch:
    """Pages of a pool at one moment: free, evictable, movable, or in use for good."""

    def __init__(
        self, free_flags: bytes, evictable: Collection[int], movable: Collection[int] = ()
    ) -> None:
        """Note what each page costs.

        Args:
            free_flags: A byte for each page: 1 if it is free.
            evictable: Pages in use that may be had at a cost of 1 each.
            movable: Pages whose content can lie elsewhere; one costs more than any run without such
                pages.
        """
        # One page that must be moved costs more than a whole run of evictable ones.
        move = 1 + len(free_flags)
        # More than any run costs that has no page in use for good.
        self._taken = move * move
        costs = [0 if free else self._taken for free in free_flags]
        for page in evictable:
            costs[page] = 1
        for page in movable:
            costs[page] = move
        # Cost of all pages before each page: that of a run is the difference of two.
        self._sums = [0, *accumulate(costs)]

    def place(self, lengths: Sequence[int]) -> list[range]:
        """Return runs of these lengths, each where it costs least, and highest among equals.

        Returns:
            The runs in order; those after the first one for which there is no room are missing.
        """
        windows = {
            length: _RunCosts(self._sums, length, self._taken) for length in set(lengths) if length
        }
        runs: list[range] = []
        for length in lengths:
            start = windows[length].best() if length else 0
            if start is None:
                break
            run = range(start, start + length)
            runs.append(run)
            # Runs of all lengths that overlap with it are ruled out.
            for each in windows.values() if length else ():
                each.take(run)
        return runs

    def place_together(self, lengths: Sequence[int]) -> list[range]:
        """Return runs of these lengths that are neighbours, as one run where it costs least; none
        if there is no such run.
        """
        whole = self.place([sum(lengths)])
        ends = list(accumulate(lengths, initial=whole[0].start)) if whole else []
        return [range(start, end) for start, end in pairwise(ends)]


class _RunCosts:
    """Costs of all runs of one length, the highest run first."""

    def __init__(self, sums: Sequence[int], length: int, taken: int) -> None:
        """Compute the costs.

        Args:
            sums: Cost of all pages before each page.
            length: Length of the runs.
            taken: Least cost of a run that cannot be had.
        """
        self._length, self._taken, self._last = length, taken, len(sums) - 1 - length
        # The cost of the run that starts at page i is sums[i + length] - sums[i].
        self._costs: list[int] = list(map(sub, sums[length:], sums))
        # Highest first: of runs that cost the same, `index` then finds the highest.
        self._costs.reverse()
        self._lowest = [self._lowest_in(start) for start in range(0, len(self._costs), _CHUNK)]

    def best(self) -> int | None:
        """Return the first page of the cheapest run; None if there is none."""
        cost = min(self._lowest, default=self._taken)
        if cost >= self._taken:
            return None
        # The first chunk that has this cost holds the highest such run.
        return self._last - self._costs.index(cost, self._lowest.index(cost) * _CHUNK)

    def take(self, run: range) -> None:
        """Rule out all runs that overlap with this one."""
        # Overlapping runs start from run.start - length + 1 to run.stop - 1, the last one first.
        first = max(0, self._last - run.stop + 1)
        end = min(len(self._costs), self._last - run.start + self._length)
        if first >= end:
            return
        self._costs[first:end] = [self._taken] * (end - first)
        for chunk in range(first // _CHUNK, (end - 1) // _CHUNK + 1):
            self._lowest[chunk] = self._lowest_in(chunk * _CHUNK)

    def _lowest_in(self, start: int) -> int:
        return min(self._costs[start : start + _CHUNK])
