"""Which pages hold the keys and values of which request: a page holds `block_tokens` tokens. Bookkeeping alone."""

from collections.abc import Sequence

from coserve.errors import BudgetError
from coserve.memory.pages import PagePool
from coserve.memory.prefix_index import Chain, PrefixIndex

OWNER = "kv"


class KvCache:
    """Sequences' pages in a pool, and the beginnings that they share."""

    def __init__(self, pool: PagePool, *, block_tokens: int = 16) -> None:
        self.pool, self.block_tokens = pool, block_tokens
        self.prefixes = PrefixIndex(block_tokens)

    @property
    def num_available(self) -> int:
        """Pages that could be had now: free ones, and those of beginnings that nobody uses."""
        return self.pool.num_free + self.prefixes.num_evictable

    def num_pages(self, num_tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-num_tokens // self.block_tokens)

    def open(self, tokens: Sequence[int], *, version: str = "", share: bool = True) -> "PagedSequence":
        """A sequence that begins with these tokens under an adapter version ("" for none), as far as they are known.

        share: whether to begin with what is known; not if every row must be run. Its `length` says how many tokens need
        not be run. No page is taken yet.
        """
        pages, chain = self.prefixes.find(version, tokens if share else ())
        self.prefixes.use(pages)
        return PagedSequence(self, pages, chain)

    def take(self, num_pages: int) -> list[int]:
        """Pages for a sequence, from unused beginnings where the free ones do not suffice; BudgetError takes
        nothing.
        """
        if num_pages > self.num_available:
            raise BudgetError(f"{num_pages} pages asked for, {self.num_available} are available")
        self.evict(num_pages - self.pool.num_free)
        pages = self.pool.take(OWNER, num_pages)
        self.prefixes.use(pages)
        return pages

    def evict(self, num_pages: int) -> int:
        """Forget beginnings that nobody uses, so that so many pages become free; returns how many did."""
        pages = self.prefixes.evict(max(0, num_pages))
        self.pool.give_back(OWNER, pages)
        return len(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """The inverse: pages that nobody else uses and no beginning keeps go back to the pool."""
        self.pool.give_back(OWNER, self.prefixes.release(pages))

    def check_integrity(self) -> None:
        """Assert the pool's and the index's invariants."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()


class PagedSequence:
    """The pages of one request; `length` tokens of it have been run."""

    def __init__(self, cache: KvCache, pages: list[int], chain: Chain) -> None:
        self.cache = cache
        self.pages, self._chain = pages, chain
        self.length = len(pages) * cache.block_tokens

    def num_pages_missing(self, num_tokens: int) -> int:
        """Pages that it takes to run so many more tokens."""
        return max(0, self.cache.num_pages(self.length + num_tokens) - len(self.pages))

    def reserve(self, num_tokens: int) -> None:
        """Take the pages that so many more tokens need; BudgetError takes nothing."""
        if missing := self.num_pages_missing(num_tokens):
            self.pages += self.cache.take(missing)

    def commit(self, num_tokens: int, tokens: Sequence[int] | None = None) -> None:
        """The batch has run: so many more tokens are in the pages. `tokens`: all so far, to make full blocks known."""
        self.length += num_tokens
        if tokens is not None:
            assert len(tokens) >= self.length
            if self.length // self.cache.block_tokens > self._chain.num_blocks:
                self._chain = self.cache.prefixes.register(self._chain, tokens[: self.length], self.pages)

    def close(self) -> None:
        """Give everything back; the sequence is over. One that is preempted is opened anew."""
        self.cache.give_back(self.pages)
        self.pages, self.length = [], 0
