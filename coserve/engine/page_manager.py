"""Management of the page pool: keys and values of requests, packs and optimizers of jobs, weights
of other models, and prefixes that may be shared again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from coserve.devices.messages.commands import Command
from coserve.devices.messages.jobs import OtherModel, PlaceOptimizer, ResizeWindow
from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.kv_cache import OWNER as KV_OWNER
from coserve.memory.pages.kv_cache import KvCache
from coserve.memory.pages.optimizer_pages import OWNER as OPTIMIZER_OWNER
from coserve.memory.pages.pack_pages import OWNER as PACK_OWNER
from coserve.memory.pages.pack_pages import PackPages, no_such_run
from coserve.memory.pages.run_search import RunSearch
from coserve.memory.pages.window_pages import OWNER as WINDOW_OWNER


class WindowNeed(NamedTuple):
    """Pages that a pack needs for weights of another model."""

    min_pages: int
    """Number of pages without which the pack cannot run."""
    max_pages: int
    """Number of pages beyond which more are of no use."""


class MomentsNeed(NamedTuple):
    """Pages that a job's optimizer moments need before it can have a pack."""

    job: str
    """Id of the job."""
    num_pages: int
    """Number of pages."""


class PageManager:
    """The manager of one pool of pages, which makes room for its owners at one another's cost.
    `num_moved` counts the pages of requests that were copied to others.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_bytes: int,
        block_tokens: int,
        send: Callable[[Command], None],
        num_state_pages: int = 0,
        max_window_bytes: int | None = None,
    ) -> None:
        """Make a pool with all pages free.

        Args:
            send: Sends the device commands for moments and weights.
            num_state_pages: See `KvCache`.
            max_window_bytes: Maximum size of the window of weights; None: that of the pool.
        """
        self.max_window_bytes = (
            num_pages * page_bytes if max_window_bytes is None else max_window_bytes
        )
        self.pool = PageAllocator(num_pages, page_bytes)
        self.cache = KvCache(self.pool, block_tokens=block_tokens, num_state_pages=num_state_pages)
        # The window holds weights of models that jobs train beside the one that serves.
        self.window = self.cache.window
        self.window.on_resize = lambda run: send(ResizeWindow(run.start, len(run)))
        self.cache.optimizers.on_place = lambda job, run: send(
            PlaceOptimizer(job, run.start, len(run))
        )
        # Sizes of groups that could not be had since the last change, and why.
        self._refused: dict[tuple[int, ...], str] = {}
        self._refused_at = 0
        # Has pages of requests copied to free ones, and sequences follow; whether it could.
        self.on_move: Callable[[Mapping[int, int]], bool] | None = None
        self.num_moved = 0
        self._window_grew_at = 0  # releases of prefixes until then

    def num_pages(self, num_bytes: int) -> int:
        """Return the number of pages of a run of this many bytes."""
        return -(-num_bytes // self.pool.page_bytes)

    def window_need(self, other: OtherModel) -> WindowNeed:
        """Return what packs of a job on another model need."""
        least, most = self.num_pages(other.least_bytes), self.num_pages(other.all_bytes)
        return WindowNeed(
            least, max(least, min(most, self.max_window_bytes // self.pool.page_bytes))
        )

    def take_pack(
        self,
        group_pages: Sequence[int | None],
        num_trained_parts: int,
        window: WindowNeed | None = None,
        moments: MomentsNeed | None = None,
    ) -> PackPages:
        """Allocate a run of neighbouring pages for each of a pack's groups (None: none for this
        one).

        Prefixes are evicted for it only where that makes a run, and pages of requests are moved
        (`on_move`) where no run can be had otherwise. What cannot be had is not looked for again
        until a page has become free or evictable.

        Args:
            window: Weights that the pack needs, at most one pack at a time. They are allocated with
                it if they are not there. The window grows as far as it can, also into prefixes that
                no request has used since the last such pack was begun, and by moving pages of
                requests.
            moments: Optimizer moments that must lie in pages; they are allocated with the pack if
                they have none, or are in the way.

        Raises:
            BudgetError: one of the runs cannot be had; nothing is allocated.
        """
        sizes = group_pages
        # Try to leave the moments where they are, and withdraw them only if they are in the way.
        if moments is not None and moments.job in self.cache.optimizers.runs:
            with suppress(BudgetError):
                return self.take_pack(group_pages, num_trained_parts, window)
            self.cache.optimizers.withdraw(moments.job)
        if moments is not None:
            # The moments' run is placed with the groups, as the last of them.
            sizes = [*group_pages, moments.num_pages]
        runs = self._take_groups(sizes) if window is None else self._take_with_window(sizes, window)
        if moments is not None and (run := runs.pop()) is not None:
            self._give_to_optimizer(moments.job, run)
        return PackPages(
            self.pool, runs, num_trained_parts, None if window is None else self.window
        )

    def _take_groups(self, group_pages: Sequence[int | None]) -> list[range | None]:
        runs = self._take_sizes(tuple([size for size in group_pages if size is not None]))
        # The usual case: only a pack from the host has groups without pages.
        if len(runs) == len(group_pages):
            return [*runs]
        left = iter(runs)
        return [None if size is None else next(left) for size in group_pages]

    def _take_with_window(
        self, group_pages: Sequence[int | None], need: WindowNeed
    ) -> list[range | None]:
        sizes, window = tuple([size for size in group_pages if size is not None]), self.window
        runs: list[range] = []
        # All moments that may leave do: the window of weights has more use for their pages.
        self.cache.optimizers.lend(self.pool.num_pages)
        if len(window.run) >= need.min_pages:
            # The pack's own runs below may shrink the window, but not below what the pack needs.
            window.require(need.min_pages)
            # Grown before the pack's runs are taken, which would lie in its way, and only so far
            # that these still find room.
            self._grow_window(need, num_kept=sum(sizes), may_move=self.on_move is not None)
            # First without the window's pages, then at the cost of those that it can lend.
            with suppress(BudgetError):
                runs = self._take_free_runs(sizes)
            if not runs:
                with suppress(BudgetError):
                    runs = self._take_sizes(sizes)
        if not runs:  # the window is too small, or in the way
            window.clear()
            # The window's run is searched together with the groups: neither blocks the other.
            *runs, run = self._take_sizes((*sizes, need.min_pages))
            # `_take_sizes` takes runs for a pack; this one belongs to the window.
            self.pool.give_back_runs(PACK_OWNER, [run])
            self.pool.take_these(WINDOW_OWNER, run)
            window.begin(run)
            window.require(need.min_pages)
        # Nothing may fail from here on: what was taken would be lost.
        self._grow_window(need, num_kept=0, may_move=False)
        self._window_grew_at = self.cache.prefixes.num_released
        left = iter(runs)
        return [None if size is None else next(left) for size in group_pages]

    def _grow_window(self, need: WindowNeed, *, num_kept: int, may_move: bool) -> None:
        """Grow the window right below it, into free pages and into prefixes unused since a pack had
        it, except for num_kept pages; pages of requests in the way may be moved.
        """
        prefixes, window, pool = self.cache.prefixes, self.window, self.pool
        unused = prefixes.unused_since(self._window_grew_at)
        # The groups of the pack are still to find num_kept free or evictable pages.
        most = max(0, pool.num_free + len(unused) - num_kept)

        def room(usable: Collection[int]) -> range:
            run = window.room_below(need.max_pages, usable)
            # Only pages next to the window are of use: the upper end of the room.
            return run[max(0, len(run) - most) :]

        below = room(unused)
        # Moving is worth it only if the window grows further than over unused prefixes alone.
        if may_move and len(wider := room(unused | prefixes.used)) > len(below):
            self.cache.evict_pages([page for page in wider if page in unused])
            # If the move fails for lack of memory, the window grows only as far as `below`.
            if self._move(sorted(prefixes.used & set(wider)), wider):
                below = wider
        self.cache.evict_pages([page for page in below if page in prefixes.evictable])
        window.grow(below)

    def _take_sizes(self, sizes: tuple[int, ...]) -> list[range]:
        """Allocate as `_take_runs` does, unless it is known that these sizes cannot be had."""
        changes = self._num_changes
        if changes != self._refused_at:
            self._refused.clear()
            self._refused_at = changes
        if (error := self._refused.get(sizes)) is not None:
            raise BudgetError(error)
        try:
            return self._take_runs(sizes)
        except BudgetError as refused:
            # Pages that the attempt took and gave back, or the window lent, are no change.
            self._refused_at = self._num_changes
            self._refused[sizes] = str(refused)
            raise

    def place_optimizer(
        self, job: str, num_bytes: int, *, num_pack_pages: int, needs_pages: bool = False
    ) -> None:
        """Allocate a run for a job's moments, which have none, if it can be had beside a pack of
        num_pack_pages.

        Args:
            needs_pages: Whether others give way to the moments, as to a pack. Otherwise they get
                only free pages, and only if optimizers have at most half of the pool then and there
                is no window of weights, which has more use for them.
        """
        num_pages, optimizers = self.num_pages(num_bytes), self.cache.optimizers
        if (
            num_pages
            > (self.cache.num_available if needs_pages else self.pool.num_free) - num_pack_pages
        ):
            return
        if not needs_pages and (
            self.window.run or num_pages + optimizers.num_pages > self.pool.num_pages // 2
        ):
            return
        if not needs_pages:
            for run in self.pool.take_runs(OPTIMIZER_OWNER, (num_pages,)):
                optimizers.begin(job, run)
            return
        with suppress(BudgetError):
            (run,) = self._take_sizes((num_pages,))
            self._give_to_optimizer(job, run)

    def _give_to_optimizer(self, job: str, run: range) -> None:
        """Hand a run that was allocated as a pack's over to a job's moments."""
        self.pool.give_back_runs(PACK_OWNER, [run])
        self.pool.take_these(OPTIMIZER_OWNER, run)
        self.cache.optimizers.begin(job, run)

    def check_integrity(
        self, held: set[int], packs: Sequence[PackPages], jobs: Collection[str] = ()
    ) -> None:
        """Assert that every page is free or owned, and that the owners are these requests, packs,
        and jobs.
        """
        self.cache.check_integrity()
        owned = self.pool.num_pages_by_owner()
        # Unused prefixes are owned by the cache, but belong to no request.
        kept = owned.get(KV_OWNER, 0) - self.cache.prefixes.num_evictable
        assert kept == len(held), f"{kept} pages are in use, requests hold {len(held)}"
        assert owned.get(PACK_OWNER, 0) == sum(pack.num_pages for pack in packs)
        assert owned.get(WINDOW_OWNER, 0) == len(self.window.run)
        assert owned.get(OPTIMIZER_OWNER, 0) == self.cache.optimizers.num_pages
        assert self.cache.optimizers.runs.keys() <= set(jobs), (
            "an optimizer that is not there has pages"
        )

    @property
    def _num_changes(self) -> int:
        """Return a counter that grows whenever a page becomes free, evictable or lendable that was
        none of these.
        """
        prefixes = self.cache.prefixes
        # An evicted page became available when it was released; its return is no second change.
        num_free = prefixes.num_released + self.pool.num_returned - prefixes.num_evicted
        return num_free + self.cache.optimizers.num_let_go

    def _take_runs(self, sizes: Sequence[int]) -> list[range]:
        # The window gives way before anything else does.
        self.window.lend(sum(sizes) - self.pool.num_free)
        optimizers = self.cache.optimizers
        while True:
            try:
                return self._take_free_runs(sizes)
            except BudgetError:
                # Too few pages in all, or nothing left to lend: a further attempt would fail, too.
                if sum(sizes) > self.cache.num_available or not (
                    self.window.num_lendable or optimizers.num_lendable
                ):
                    raise
            if self.window.num_lendable:
                # Enough pages, but not side by side: lend all that the window can spare.
                self.window.lend(self.window.num_lendable)
            else:  # one after the other, as few as it takes
                optimizers.lend(1)

    def _take_free_runs(self, sizes: Sequence[int]) -> list[range]:
        prefixes, pool = self.cache.prefixes, self.pool
        # Free pages cost nothing, so they are tried before the search.
        if sum(sizes) <= pool.num_free:
            runs = pool.take_runs(PACK_OWNER, sizes)
            if len(runs) == len(sizes):
                return runs
            pool.give_back_runs(PACK_OWNER, runs)
        # A moved page needs another place, so free and evictable pages must suffice for all groups.
        may_move = self.on_move is not None and sum(sizes) <= pool.num_free + prefixes.num_evictable
        search = RunSearch(pool.free_flags(), prefixes.evictable, prefixes.used if may_move else ())
        runs = search.place(sizes)
        if len(runs) < len(sizes):
            first_without = sizes[len(runs)]
            # Each group where it costs fewest prefixes may leave no run for the last: then all of
            # them side by side.
            runs = search.place_together(sizes)
            if not runs:
                raise no_such_run(pool, first_without)
        # The runs are emptied first (prefixes evicted, pages of requests moved), then taken.
        inside = {page for run in runs for page in run}
        self.cache.evict_pages([page for run in runs for page in run if page in prefixes.evictable])
        if (moving := sorted(inside & prefixes.used)) and not self._move(moving, inside):
            raise no_such_run(pool, max(sizes))
        for run in runs:
            pool.take_these(PACK_OWNER, run)
        return runs

    def _move(self, pages: Sequence[int], inside: Collection[int]) -> bool:
        """Have pages of requests copied to others that are not inside. Returns whether that was
        done.
        """
        assert self.on_move is not None
        # Targets must be free and lie outside. Prefixes inside were evicted by the caller, so the
        # pages evicted here are outside.
        self.cache.evict(
            len(pages) - (self.pool.num_free - sum([self.pool.is_free(page) for page in inside]))
        )
        places = (
            page
            for page, is_free in enumerate(self.pool.free_flags())
            if is_free and page not in inside
        )
        targets = dict(zip(pages, places, strict=False))
        assert len(targets) == len(pages)
        if not self.on_move(targets):
            return False
        # The books follow only after the device has copied the pages.
        self.cache.move(targets)
        self.num_moved += len(targets)
        return True
