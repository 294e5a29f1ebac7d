"""Pages of a pack in memory: one run of neighbours for each group of tensors, and when each is
freed.

The first group is the workspace, and lasts as long as the pack. After it comes what is saved of
every part of the model, in forward order. Parts that run backward hold theirs until they have done
so, from the last one down; the parts below these only until the forward pass is done, whose windows
need their keys and values. A device follows the same rule with the tensors (`TrainingPass`).
Bookkeeping alone.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator, runs_below
from coserve.memory.pages.window_pages import WindowPages

OWNER = "activations"


class PackProgress(Protocol):
    """Progress of a pack (`coserve.tuning.cursor.Cursor`)."""

    @property
    def saved_all(self) -> bool:
        """Return whether the forward pass is done."""
        ...

    @property
    def done(self) -> bool:
        """Return whether the whole pack is done."""
        ...

    @property
    def num_parts_reversed(self) -> int:
        """Return the number of parts that have run backward."""
        ...


class PackPages:
    """Runs of pages of one pack."""

    def __init__(
        self,
        pool: PageAllocator,
        runs: Sequence[range | None],
        num_trained_parts: int,
        window: WindowPages | None = None,
    ) -> None:
        """Hold runs that were taken for the pack (as `OWNER`).

        Args:
            pool: Allocator of the pages.
            runs: Run of each group; None: the pack has freed it already.
            num_trained_parts: Number of parts, from the last one down, that run backward.
            window: Window of weights that the pack needs as long as it lasts.
        """
        self._pool, self._window = pool, window
        self.runs: list[range | None] = list(runs)
        held = [run for run in runs if run is not None]
        lengths = tuple(map(len, held))
        self.num_pages = sum(lengths)
        """Number of pages that the pack holds."""
        # Index of the first group of a part that runs backward.
        self._first_trained = len(runs) - num_trained_parts
        # Whether the groups below the first trained one have been freed.
        self._saved_all = False
        # Groups from here on have run backward and been freed.
        self._end = len(runs)
        # The end of the first run, and the lengths of all, where each run lies right below the one
        # before, as it mostly does: neighbouring groups are then freed as one run.
        self._as_one: tuple[int, tuple[int, ...]] | None = None
        if held and tuple(runs) == (laid := runs_below(held[0].stop, lengths)):
            self._as_one = held[0].stop, lengths
            self.runs = list(laid)  # those of groups without pages equal these wherever they lie

    @property
    def pages(self) -> list[int]:
        """Return the pages that the pack holds, run by run."""
        return [page for run in self.runs if run is not None for page in run]

    @property
    def group_pages(self) -> list[int | None]:
        """Return the number of pages of each group; None: it was freed."""
        return [None if run is None else len(run) for run in self.runs]

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Return the first page and the length of each run that the pack holds."""
        # All runs are still held, one below the other.
        if self._as_one is not None and self.num_pages == sum(self._as_one[1]):
            return _places_below(*self._as_one)
        return tuple([(run.start, len(run)) for run in self.runs if run is not None])

    def follow(self, cursor: PackProgress) -> None:
        """Free the runs that the pack does not need any more."""
        if cursor.done:
            self.release()
        elif cursor.saved_all:
            if not self._saved_all:
                # Groups of parts that are not trained: only the forward pass reads these.
                self._give_back(1, self._first_trained)
                self._saved_all = True
            # Parts run backward from the last one down, so their groups are freed from the end.
            end = len(self.runs) - cursor.num_parts_reversed
            self._give_back(end, self._end)
            self._end = end

    def release(self) -> None:
        """Free all runs."""
        if self.num_pages and self._saved_all:
            # The workspace, and groups of parts still to run backward; `follow` freed the others.
            self._give_back(0, 1)
            self._give_back(self._first_trained, self._end)
        elif self.num_pages:
            self._give_back(0, self._end)
        if self._window is not None:
            # The window may be lent in full again.
            self._window.require(0)
            self._window = None

    def _give_back(self, start: int, end: int) -> None:
        """Free the runs of these groups that the pack holds: all of them, unless it came with
        fewer.
        """
        if start >= end:
            return
        first, last = self.runs[start], self.runs[end - 1]
        if self._as_one is not None and first is not None and last is not None:
            # Each run lies below the one before, so together they reach from the last to the first.
            gone = [range(last.start, first.stop)]
        else:
            gone = [run for run in self.runs[start:end] if run is not None]
        self.runs[start:end] = [None] * (end - start)
        if gone:
            self._pool.give_back_runs(OWNER, gone)
            self.num_pages -= sum(map(len, gone))


@lru_cache(maxsize=64)
def _places_below(top: int, lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return what `PackPages.places` does for runs one below the other."""
    return tuple([(run.start, len(run)) for run in runs_below(top, lengths)])


def no_such_run(pool: PageAllocator, num_pages: int) -> BudgetError:
    """Return the error for a run that is not there."""
    return BudgetError(
        f"{num_pages} neighbouring pages asked for; {pool.num_free} are free, "
        f"{pool.longest_free_run()} of them side by side"
    )
