"""Who holds which pages: requests' keys and values, packs of jobs, and prefixes that may be shared again."""

from collections.abc import Sequence
from itertools import accumulate

from coserve.errors import BudgetError
from coserve.memory.kv_cache import OWNER as KV_OWNER
from coserve.memory.kv_cache import KvCache
from coserve.memory.pack_pages import OWNER as PACK_OWNER
from coserve.memory.pack_pages import PackPages, take_runs
from coserve.memory.pages import PagePool


class PageBroker:
    """One pool of pages, and what it is lent for."""

    def __init__(self, *, num_pages: int, page_bytes: int, block_tokens: int) -> None:
        self.pool = PagePool(num_pages, page_bytes)
        self.cache = KvCache(self.pool, block_tokens=block_tokens)

    @property
    def num_available(self) -> int:
        """Pages that could be had now: free ones, and those of prefixes that no request uses."""
        return self.cache.num_available

    def num_pages(self, num_bytes: int) -> int:
        """Pages of a run of this many bytes."""
        return -(-num_bytes // self.pool.page_bytes)

    def take_pack(self, group_pages: Sequence[int], num_trained_parts: int) -> PackPages:
        """Runs for a pack's groups; BudgetError, and nothing is taken, if one cannot be had.

        Prefixes are forgotten for it only where that makes a run, and as few as that takes.
        """
        try:
            runs = take_runs(self.pool, group_pages, self._clear_run)
        except BudgetError:
            # Each group where it costs fewest prefixes may leave no run for the last: then all of them side by side.
            if not self._clear_run(sum(group_pages)):
                raise
            runs = take_runs(self.pool, group_pages)
        return PackPages(self.pool, runs, num_trained_parts)

    def check_integrity(self, held: set[int], packs: Sequence[PackPages]) -> None:
        """Assert that every page is free or owned, and that those owned are these requests' and packs'."""
        self.cache.check_integrity()
        owned = self.pool.num_pages_by_owner()
        kept = owned.get(KV_OWNER, 0) - self.cache.prefixes.num_evictable
        assert kept == len(held), f"{kept} pages are in use, requests hold {len(held)}"
        assert owned.get(PACK_OWNER, 0) == sum(pack.num_pages for pack in packs)

    def _clear_run(self, num_pages: int) -> bool:
        """Free a run of this many neighbours: of all that are free or could be, the one with fewest prefixes in it."""
        evictable = self.cache.prefixes.evictable
        costs = [0 if free else 1 if page in evictable else None for page, free in enumerate(self.pool.free_flags())]
        sums = [0, *accumulate(cost or 0 for cost in costs)]
        best: tuple[int, int] | None = None
        length = 0
        for end, cost in enumerate(costs, 1):
            length = 0 if cost is None else length + 1
            if length >= num_pages:
                start = end - num_pages
                # Of equal ones the highest: requests take pages from the bottom.
                found = sums[end] - sums[start], -start
                best = found if best is None or found < best else best
        if best is None:
            return False
        start = -best[1]
        pages = [page for page in range(start, start + num_pages) if costs[page]]
        self.cache.evict_pages(pages)
        return True
