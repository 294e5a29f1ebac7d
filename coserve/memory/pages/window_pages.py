"""The pages that weights of other models pass through: one run, which gives way to everybody.
Bookkeeping alone.

A device follows it with the weights (`coserve.memory.tensors.weight_window`). Requests take pages of it as
if they were free: it shrinks from below, where requests' pages come from, down to what the pack in
memory cannot do without.
"""

from collections.abc import Callable, Collection

from coserve.memory.pages.allocator import PageAllocator

OWNER = "weights"


class WindowPages:
    """run: the pages, empty if there is no window. num_lendable: of these, that others can have
    now.
    """

    def __init__(self, pool: PageAllocator) -> None:
        self.run = range(0)
        self.num_lendable = 0
        self.on_resize: Callable[[range], None] | None = None
        """Called with the run whenever it has become another one."""
        self._pool, self._least = pool, 0

    def require(self, num_pages: int) -> None:
        """As many pages are to stay (0: none)."""
        self._least = num_pages
        self.num_lendable = max(0, len(self.run) - num_pages)

    def lend(self, num_pages: int) -> None:
        """Give up to as many pages back, as far as that can be done."""
        if not self.num_lendable:
            return
        self._set(range(self.run.start + max(0, min(num_pages, self.num_lendable)), self.run.stop))

    def clear(self) -> None:
        """There is no window any more."""
        self.require(0)
        self.lend(len(self.run))

    def begin(self, run: range) -> None:
        """A run that was taken for it (`OWNER`) is the window; there was none."""
        assert not self.run
        self._report(run)

    def room_below(self, most_pages: int, evictable: Collection[int]) -> range:
        """Pages right below it that it could have, until it has as many: free ones, and these."""
        flags = bytearray(self._pool.free_flags())
        for page in evictable:
            flags[page] = 1
        first = flags.rfind(0, 0, self.run.start) + 1
        return range(min(self.run.start, max(first, self.run.stop - most_pages)), self.run.start)

    def grow(self, pages: range) -> None:
        """Take these pages right below it, which are free."""
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
        self.require(self._least)
        if self.on_resize is not None:
            self.on_resize(run)
