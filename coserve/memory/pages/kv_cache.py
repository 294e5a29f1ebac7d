"""Which pages hold the keys and values of which request: a page holds `block_tokens` tokens.
Bookkeeping alone.

Where a model carries states from row to row (gated delta layers), each request has pages for these,
too, which come first. Then nothing is shared: the state after a prefix is not kept.
"""

from collections.abc import Mapping, Sequence

from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.optimizer_pages import OptimizerPages
from coserve.memory.pages.prefix_index import PrefixIndex, PrefixOwner
from coserve.memory.pages.window_pages import WindowPages

OWNER = "kv"


class KvCache:
    """Sequences' pages in a pool, and the beginnings that they share."""

    def __init__(
        self, pool: PageAllocator, *, block_tokens: int = 16, num_state_pages: int = 0
    ) -> None:
        """num_state_pages: of each request, for its states."""
        self.pool, self.block_tokens, self.num_state_pages = pool, block_tokens, num_state_pages
        self.prefixes = PrefixIndex(block_tokens, shares=not num_state_pages)
        self.window = WindowPages(pool)
        self.optimizers = OptimizerPages(pool)

    @property
    def num_available(self) -> int:
        """Pages that could be had now: free ones, those of prefixes that no sequence uses, and what
        the window of weights and the optimizers of jobs can lend.
        """
        others = self.window.num_lendable + self.optimizers.num_lendable
        return self.pool.num_free + self.prefixes.num_evictable + others

    def num_pages(self, num_tokens: int) -> int:
        """Pages of a sequence of this many tokens."""
        return self.num_state_pages + -(-num_tokens // self.block_tokens)

    def open(self, keys: Sequence[bytes], num_tokens: int) -> "PagedSequence":
        """A sequence of tokens whose blocks have these keys (`PrefixIndex.keys`; none if every row
        must be run).

        It begins with the blocks that are known; its `length` says how many tokens need not be run:
        fewer than num_tokens. No page is taken yet.
        """
        pages = self.prefixes.find(keys, num_tokens)
        self.prefixes.use(pages)
        return PagedSequence(self, pages, keys)

    def num_pages_to_open(self, keys: Sequence[bytes], num_tokens: int) -> tuple[int, int]:
        """For a sequence of this many tokens: by how many the available pages would fall if it were
        opened and run, and how many of its tokens are known.
        """
        pages = self.prefixes.find(keys, num_tokens)
        num_unused = sum(page in self.prefixes.evictable for page in pages)
        return self.num_pages(num_tokens) - len(pages) + num_unused, len(pages) * self.block_tokens

    def take(self, num_pages: int) -> list[int]:
        """Pages for a sequence, from the window of weights, then from unused beginnings, then from
        optimizers, where the free ones do not suffice; BudgetError takes nothing.
        """
        if num_pages > self.num_available:
            raise BudgetError(f"{num_pages} pages asked for, {self.num_available} are available")
        self.window.lend(num_pages - self.pool.num_free)
        self.optimizers.lend(num_pages - self.pool.num_free - self.prefixes.num_evictable)
        self.evict(num_pages - self.pool.num_free)
        pages = self.pool.take(OWNER, num_pages)
        self.prefixes.use(pages)
        return pages

    def evict(self, num_pages: int) -> int:
        """Forget prefixes that no sequence uses until as many pages are free; returns how many
        became free.
        """
        pages = self.prefixes.evict(max(0, num_pages))
        self.pool.give_back(OWNER, pages)
        return len(pages)

    def evict_pages(self, pages: Sequence[int]) -> None:
        """Forget what these pages hold, which no sequence uses, so that they become free."""
        self.prefixes.evict_pages(pages)
        self.pool.give_back(OWNER, pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """The inverse: pages that no other sequence uses and no prefix keeps go back to the
        pool.
        """
        self.pool.give_back(OWNER, self.prefixes.release(pages))

    def move(self, targets: Mapping[int, int]) -> None:
        """Pages that sequences have lie elsewhere now (`PagedSequence.move`, for each of them)."""
        self.prefixes.move(targets)
        self.pool.move(targets)

    def check_integrity(self) -> None:
        """Assert the pool's and the index's invariants."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()


class PagedSequence:
    """The pages of one request; `length` tokens of it have been run."""

    def __init__(self, cache: KvCache, pages: list[int], keys: Sequence[bytes]) -> None:
        self.cache, self.pages = cache, pages
        self.length = len(pages) * cache.block_tokens
        self._block, self._num_state_pages = cache.block_tokens, cache.num_state_pages
        self._keys = list(keys)
        self._num_known = len(pages)  # blocks that are in the index, or have been offered to it

    def num_pages_missing(self, num_tokens: int) -> int:
        """Pages that it takes to run this many more tokens."""
        missing = (
            self._num_state_pages - (-(self.length + num_tokens) // self._block) - len(self.pages)
        )
        return (
            missing if missing > 0 else 0
        )  # asked of every request in every step: calls would be most of it

    def reserve(self, num_tokens: int) -> None:
        """Take the pages that this many more tokens need; BudgetError takes nothing."""
        if missing := self.num_pages_missing(num_tokens):
            self.pages += self.cache.take(missing)

    def fill(self, num_blocks: int) -> None:
        """The next pages are filled with their blocks by other means than rows. They are made known
        with the next `commit`: until then, it is not known whether that was done.
        """
        self.length += num_blocks * self._block
        assert len(self.pages) * self._block >= self.length

    def commit(self, num_tokens: int, tokens: Sequence[int], owner: PrefixOwner) -> None:
        """The rows of this many tokens have run. `tokens`: all so far, to make full blocks
        known.
        """
        self.length += num_tokens
        assert len(tokens) >= self.length
        num_blocks = self.length // self._block
        if num_blocks > self._num_known and not self._num_state_pages:
            prefixes = self.cache.prefixes
            if len(self._keys) < num_blocks:
                self._keys = prefixes.keys(owner, tokens[: self.length], known=self._keys)
            prefixes.register(self._keys, self.pages, range(self._num_known, num_blocks))
            self._num_known = num_blocks

    def move(self, targets: Mapping[int, int]) -> None:
        """Pages lie elsewhere now."""
        self.pages = [targets.get(page, page) for page in self.pages]

    def close(self) -> None:
        """Give everything back; the sequence is over. One that is preempted is opened anew."""
        self.cache.give_back(self.pages)
        self.pages, self.length = [], 0
