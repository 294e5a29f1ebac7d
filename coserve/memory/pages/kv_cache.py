"""Pages that hold the keys and values of requests, `block_tokens` tokens each. Bookkeeping alone.

Where a model carries states from row to row (gated delta layers), each request also has pages for
these, which come first. Nothing is shared then, since the state after a prefix is not kept.
"""

from collections.abc import Mapping, Sequence

from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.optimizer_pages import OptimizerPages
from coserve.memory.pages.prefix_index import PrefixIndex, PrefixOwner
from coserve.memory.pages.window_pages import WindowPages

OWNER = "kv"


class KvCache:
    """Pages of sequences, and the prefixes that sequences share."""

    def __init__(
        self, pool: PageAllocator, *, block_tokens: int = 16, num_state_pages: int = 0
    ) -> None:
        """Begin without sequences.

        Args:
            pool: Allocator of the pages.
            block_tokens: Tokens of a page.
            num_state_pages: Pages of each request's states.
        """
        self.pool, self.block_tokens, self.num_state_pages = pool, block_tokens, num_state_pages
        self.prefixes = PrefixIndex(block_tokens, shares=not num_state_pages)
        self.window = WindowPages(pool)
        self.optimizers = OptimizerPages(pool)

    @property
    def num_available(self) -> int:
        """Return the number of pages that a sequence could take now.

        They are free, or of prefixes that no sequence uses, or the window of weights and the
        optimizers of jobs can lend them.
        """
        others = self.window.num_lendable + self.optimizers.num_lendable
        return self.pool.num_free + self.prefixes.num_evictable + others

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages of a sequence of this many tokens."""
        return self.num_state_pages + -(-num_tokens // self.block_tokens)

    def open(self, keys: Sequence[bytes], num_tokens: int) -> "PagedSequence":
        """Return a sequence that begins with the known blocks of its tokens; no page is taken yet.

        Args:
            keys: Keys of its blocks (`PrefixIndex.keys`); none if every row must be run.
            num_tokens: Number of its tokens. Fewer of them are known, as `length` of the result
                says.
        """
        pages = self.prefixes.find(keys, num_tokens)
        self.prefixes.use(pages)
        return PagedSequence(self, pages, keys)

    def num_pages_to_open(self, keys: Sequence[bytes], num_tokens: int) -> tuple[int, int]:
        """Return what opening and running a sequence would take.

        Returns:
            The number of pages by which `num_available` would fall, and the number of known tokens.
        """
        pages = self.prefixes.find(keys, num_tokens)
        # Known pages without a user count as available until they are opened.
        num_unused = sum(page in self.prefixes.evictable for page in pages)
        return self.num_pages(num_tokens) - len(pages) + num_unused, len(pages) * self.block_tokens

    def take(self, num_pages: int) -> list[int]:
        """Take pages for a sequence.

        Where too few are free, they come from the window of weights, then from unused prefixes,
        then from optimizers.

        Raises:
            BudgetError: Too few pages are available; none is taken.
        """
        if num_pages > self.num_available:
            raise BudgetError(f"{num_pages} pages asked for, {self.num_available} are available")
        self.window.lend(num_pages - self.pool.num_free)
        # Moments leave only if evicting all unused prefixes would not suffice.
        self.optimizers.lend(num_pages - self.pool.num_free - self.prefixes.num_evictable)
        self.evict(num_pages - self.pool.num_free)
        pages = self.pool.take(OWNER, num_pages)
        # A page without a known block has a user count, too, until it is given back.
        self.prefixes.use(pages)
        return pages

    def evict(self, num_pages: int) -> int:
        """Forget prefixes that no sequence uses until as many more pages are free; return how many
        are.
        """
        pages = self.prefixes.evict(max(0, num_pages))
        self.pool.give_back(OWNER, pages)
        return len(pages)

    def evict_pages(self, pages: Sequence[int]) -> None:
        """Forget the content of these pages, which no sequence uses, so that they are free."""
        self.prefixes.evict_pages(pages)
        self.pool.give_back(OWNER, pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages of a sequence that no other sequence uses and no prefix keeps."""
        self.pool.give_back(OWNER, self.prefixes.release(pages))

    def move(self, targets: Mapping[int, int]) -> None:
        """Note that pages of sequences are others now; `PagedSequence.move` of each sequence goes
        with it.
        """
        self.prefixes.move(targets)
        self.pool.move(targets)

    def check_integrity(self) -> None:
        """Assert the pool's and the index's invariants."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()


class PagedSequence:
    """Pages of one request, of which the first `length` tokens have been run."""

    def __init__(self, cache: KvCache, pages: list[int], keys: Sequence[bytes]) -> None:
        self.cache, self.pages = cache, pages
        self.length = len(pages) * cache.block_tokens
        self._block, self._num_state_pages = cache.block_tokens, cache.num_state_pages
        self._keys = list(keys)
        # Blocks that are in the index, or have been offered to it.
        self._num_known = len(pages)

    def num_pages_missing(self, num_tokens: int) -> int:
        """Return the number of pages that it takes to run this many more tokens."""
        # Called for every request in every step: further calls would be most of its time.
        num_blocks = -(-(self.length + num_tokens) // self._block)
        missing = self._num_state_pages + num_blocks - len(self.pages)
        return missing if missing > 0 else 0

    def reserve(self, num_tokens: int) -> None:
        """Take the pages that this many more tokens need.

        Raises:
            BudgetError: Too few pages are available; none is taken.
        """
        if missing := self.num_pages_missing(num_tokens):
            self.pages += self.cache.take(missing)

    def fill(self, num_blocks: int) -> None:
        """Note that the next pages are filled with their blocks by other means than rows.

        The blocks become known with the next `commit`, since until then they may not be there.
        """
        self.length += num_blocks * self._block
        assert len(self.pages) * self._block >= self.length

    def commit(self, num_tokens: int, tokens: Sequence[int], owner: PrefixOwner) -> None:
        """Note that this many tokens have run, and make full blocks known.

        Args:
            num_tokens: Number of tokens that have run.
            tokens: All tokens so far.
            owner: Owner of the requests that may share the blocks.
        """
        self.length += num_tokens
        assert len(tokens) >= self.length
        num_blocks = self.length // self._block
        # With pages of states nothing is shared, so blocks have no keys.
        if num_blocks > self._num_known and not self._num_state_pages:
            prefixes = self.cache.prefixes
            # Blocks that the output has filled have no keys yet.
            if len(self._keys) < num_blocks:
                self._keys = prefixes.keys(owner, tokens[: self.length], known=self._keys)
            prefixes.register(self._keys, self.pages, range(self._num_known, num_blocks))
            self._num_known = num_blocks

    def move(self, targets: Mapping[int, int]) -> None:
        """Note that pages are others now."""
        self.pages = [targets.get(page, page) for page in self.pages]

    def close(self) -> None:
        """Free all pages and end the sequence; one that is preempted is opened anew."""
        self.cache.give_back(self.pages)
        self.pages, self.length = [], 0
