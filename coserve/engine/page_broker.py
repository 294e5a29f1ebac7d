"""Who holds which pages: requests' keys and values, packs of jobs, and prefixes that may be shared again."""

from collections.abc import Sequence
from contextlib import suppress

from coserve.errors import BudgetError
from coserve.memory.kv_cache import OWNER as KV_OWNER
from coserve.memory.kv_cache import KvCache
from coserve.memory.pack_pages import OWNER as PACK_OWNER
from coserve.memory.pack_pages import PackPages, no_such_run, take_runs
from coserve.memory.pages import PagePool
from coserve.memory.run_search import RunSearch


class PageBroker:
    """One pool of pages, and what it is lent for."""

    def __init__(self, *, num_pages: int, page_bytes: int, block_tokens: int) -> None:
        self.pool = PagePool(num_pages, page_bytes)
        self.cache = KvCache(self.pool, block_tokens=block_tokens)
        # Sizes of groups that could not be had since the last change, and why.
        self._refused: dict[tuple[int, ...], str] = {}
        self._refused_at = 0

    @property
    def num_available(self) -> int:
        """Pages that could be had now: free ones, and those of prefixes that no request uses."""
        return self.cache.num_available

    def num_pages(self, num_bytes: int) -> int:
        """Pages of a run of this many bytes."""
        return -(-num_bytes // self.pool.page_bytes)

    def take_pack(self, group_pages: Sequence[int | None], num_trained_parts: int) -> PackPages:
        """Runs for a pack's groups (None: for this one none); BudgetError, and nothing is taken, if one cannot be had.

        Prefixes are forgotten for it only where that makes a run, and as few as that takes. What cannot be had is not
        looked for again until a page has become free or evictable.
        """
        sizes, changes = tuple([size for size in group_pages if size is not None]), self._num_changes
        if changes != self._refused_at:
            self._refused.clear()
            self._refused_at = changes
        if (error := self._refused.get(sizes)) is not None:
            raise BudgetError(error)
        try:
            runs = iter(self._take_runs(sizes))
        except BudgetError as refused:
            self._refused[sizes] = str(refused)
            raise
        return PackPages(self.pool, [None if size is None else next(runs) for size in group_pages], num_trained_parts)

    def check_integrity(self, held: set[int], packs: Sequence[PackPages]) -> None:
        """Assert that every page is free or owned, and that those owned are these requests' and packs'."""
        self.cache.check_integrity()
        owned = self.pool.num_pages_by_owner()
        kept = owned.get(KV_OWNER, 0) - self.cache.prefixes.num_evictable
        assert kept == len(held), f"{kept} pages are in use, requests hold {len(held)}"
        assert owned.get(PACK_OWNER, 0) == sum(pack.num_pages for pack in packs)

    @property
    def _num_changes(self) -> int:
        """Grows whenever a page becomes free or evictable that was neither."""
        prefixes = self.cache.prefixes
        return prefixes.num_released + self.pool.num_returned - prefixes.num_evicted

    def _take_runs(self, sizes: Sequence[int]) -> list[range]:
        if sum(sizes) <= self.pool.num_free:
            with suppress(BudgetError):
                return take_runs(self.pool, sizes)
        search = RunSearch(self.pool.free_flags(), self.cache.prefixes.evictable)
        runs = search.place(sizes)
        if len(runs) < len(sizes):
            first_without = sizes[len(runs)]
            # Each group where it costs fewest prefixes may leave no run for the last: then all of them side by side.
            runs = search.place_together(sizes)
            if not runs:
                raise no_such_run(self.pool, first_without)
        self.cache.evict_pages([page for run in runs for page in run if page in self.cache.prefixes.evictable])
        for run in runs:
            self.pool.take_these(PACK_OWNER, run)
        return runs
