"""The pages of a pack in memory: one run of neighbours for each group of tensors, and when each
goes back.

The first group is the workspace, and lasts as long as the pack; after it comes what is saved of
every part of the model in forward order. Parts that run backward hold theirs until they have, from
the last one down; the parts below these only until the forward pass is done, whose windows needed
their K and V. A device follows the same rule with the tensors (`TrainingPass`). Bookkeeping alone.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator, runs_below
from coserve.memory.pages.window_pages import WindowPages

OWNER = "activations"


class PackProgress(Protocol):
    """How far a pack has come (`coserve.tuning.cursor.Cursor`)."""

    @property
    def saved_all(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    @property
    def num_parts_reversed(self) -> int: ...


class PackPages:
    """The runs of one pack."""

    def __init__(
        self,
        pool: PageAllocator,
        runs: Sequence[range | None],
        num_trained_parts: int,
        window: WindowPages | None = None,
    ) -> None:
        """runs: None for groups that the pack has let go already. num_trained_parts: how many of
        the groups' parts, from the last one down, run backward. window: of weights that it needs as
        long as it lasts.
        """
        self._pool, self._window = pool, window
        self.runs: list[range | None] = list(runs)
        held = [run for run in runs if run is not None]
        lengths = tuple(map(len, held))
        self.num_pages = sum(lengths)  # that it still holds
        self._first_trained = len(runs) - num_trained_parts
        self._saved_all = (
            False  # whether the groups below the first trained one have been given back
        )
        self._end = len(
            runs
        )  # of the groups that run backward, from here on all have been given back
        # Where the runs lie one below the other, as they mostly do: the first one's end, and their
        # lengths.
        self._as_one: tuple[int, tuple[int, ...]] | None = None
        if held and tuple(runs) == (laid := runs_below(held[0].stop, lengths)):
            self._as_one = held[0].stop, lengths
            self.runs = list(laid)  # those of groups without pages equal these wherever they lie

    @property
    def pages(self) -> list[int]:
        """That it still holds, run by run."""
        return [page for run in self.runs if run is not None for page in run]

    @property
    def group_pages(self) -> list[int | None]:
        """How many each group holds; None for one that was given back."""
        return [None if run is None else len(run) for run in self.runs]

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each run that it still holds, the first page and how many there are."""
        if self._as_one is not None and self.num_pages == sum(self._as_one[1]):
            return _places_below(*self._as_one)
        return tuple([(run.start, len(run)) for run in self.runs if run is not None])

    def follow(self, cursor: PackProgress) -> None:
        """Give back what the pack does not need any more."""
        if cursor.done:
            self.release()
        elif cursor.saved_all:
            if not self._saved_all:
                self._give_back(1, self._first_trained)
                self._saved_all = True
            end = len(self.runs) - cursor.num_parts_reversed
            self._give_back(end, self._end)
            self._end = end

    def release(self) -> None:
        """Give back all of it."""
        if self.num_pages and self._saved_all:
            self._give_back(0, 1)
            self._give_back(self._first_trained, self._end)
        elif self.num_pages:
            self._give_back(0, self._end)
        if self._window is not None:
            self._window.require(0)
            self._window = None

    def _give_back(self, start: int, end: int) -> None:
        """Of the runs of these groups, those that it still holds; all of them, unless it came with
        fewer.
        """
        if start >= end:
            return
        first, last = self.runs[start], self.runs[end - 1]
        if self._as_one is not None and first is not None and last is not None:
            gone = [range(last.start, first.stop)]
        else:
            gone = [run for run in self.runs[start:end] if run is not None]
        self.runs[start:end] = [None] * (end - start)
        if gone:
            self._pool.give_back_runs(OWNER, gone)
            self.num_pages -= sum(map(len, gone))


@lru_cache(maxsize=64)
def _places_below(top: int, lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """See `PackPages.places`."""
    return tuple([(run.start, len(run)) for run in runs_below(top, lengths)])


def no_such_run(pool: PageAllocator, num_pages: int) -> BudgetError:
    """There is no run of this many pages."""
    return BudgetError(
        f"{num_pages} neighbouring pages asked for; {pool.num_free} are free, "
        f"{pool.longest_free_run()} of them side by side"
    )
