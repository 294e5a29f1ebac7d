"""Pages that weights of other models pass through: one run, which gives way to everybody.
Bookkeeping alone.

A device moves the weights accordingly (`coserve.memory.tensors.weight_window`). Requests may take
pages of the run as if they were free: it shrinks from below, where requests' pages come from, down
to what the pack in memory cannot do without.
"""

from collections.abc import Callable, Collection

from coserve.memory.pages.allocator import PageAllocator

OWNER = "weights"


class WindowPages:
    """Run of pages for a window of weights; empty if there is none."""

    def __init__(self, pool: PageAllocator) -> None:
        self.run = range(0)
        """The pages; empty if there is no window."""
        self.num_lendable = 0
        """Number of pages that others can have now."""
        self.on_resize: Callable[[range], None] | None = None
        """Called with the run whenever it has become another one."""
        self._pool, self._least = pool, 0

    def require(self, num_pages: int) -> None:
        """Set how many pages are to stay (0: none)."""
        self._least = num_pages
        self.num_lendable = max(0, len(self.run) - num_pages)

    def lend(self, num_pages: int) -> None:
        """Free as many pages, as far as the window can do without them."""
        if not self.num_lendable:
            return
        # Pages are given from below: weights at the top of the window stay where they are.
        self._set(range(self.run.start + max(0, min(num_pages, self.num_lendable)), self.run.stop))

    def clear(self) -> None:
        """Free all pages: there is no window any more."""
        self.require(0)
        self.lend(len(self.run))

    def begin(self, run: range) -> None:
        """Use a run that was taken for the window (as `OWNER`); there was none."""
        assert not self.run
        self._report(run)

    def room_below(self, most_pages: int, evictable: Collection[int]) -> range:
        """Return the pages right below the window by which it could grow.

        Args:
            most_pages: Largest size of the window then.
            evictable: Pages that count as free.
        """
        flags = bytearray(self._pool.free_flags())
        for page in evictable:
            flags[page] = 1
        # One above the highest page in use below the window.
        first = flags.rfind(0, 0, self.run.start) + 1
        return range(min(self.run.start, max(first, self.run.stop - most_pages)), self.run.start)

    def grow(self, pages: range) -> None:
        """Take free pages right below the window."""
        start = pages.start
        self._pool.take_these(OWNER, pages)
        if pages:
            self._report(range(start, self.run.stop))

    def _set(self, run: range) -> None:
        if run != self.run:
            self._pool.give_back_runs(OWNER, [range(self.run.start, run.start)])
            self._report(run if run else range(0))

    def _report(self, run: range) -> None:
        self.run = run
        # The number of pages that can be lent follows from the new size.
        self.require(self._least)
        if self.on_resize is not None:
            self.on_resize(run)
