"""Which pages hold the keys and values of which tokens: full blocks that requests with the same beginning share.

A block is found by a hash of its tokens and all tokens before it, beginning with the adapter version, so that an
entry can never be seen under another version. Blocks are counted by their users; those that nobody uses stay until
their page is needed, and the one unused longest goes first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, kw_only=True)
class Chain:
    """How far the blocks of a sequence have been hashed, and the hash of all of them."""

    num_blocks: int
    key: bytes


class PrefixIndex:
    """Pure bookkeeping: page numbers in, page numbers out. It owns nothing; the cache above it takes and returns
    pages.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._page: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # the longest unused first

    @property
    def num_evictable(self) -> int:
        """Pages that nobody uses."""
        return len(self._unused)

    def find(self, version: str, tokens: Sequence[int]) -> tuple[list[int], Chain]:
        """Pages of the longest known beginning, in whole blocks, and its chain; at least one token is left to
        compute.
        """
        pages, chain = (
            [],
            Chain(num_blocks=0, key=blake2b(version.encode(), digest_size=16, person=b"version").digest()),
        )
        while chain.num_blocks < (len(tokens) - 1) // self.block_tokens:
            longer = self._longer(chain, tokens)
            if longer.key not in self._page:
                break
            pages.append(self._page[longer.key])
            chain = longer
        return pages, chain

    def use(self, pages: Sequence[int]) -> None:
        """Count one more user of each."""
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self._unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> list[int]:
        """Count one user less of each; returns the pages that nobody uses and no index entry keeps."""
        loose = []
        # The end of a sequence is of less use to others than its beginning: it goes first.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._hash:
                self._unused[page] = None
            else:
                loose.append(page)
        return loose

    def register(self, chain: Chain, tokens: Sequence[int], pages: Sequence[int]) -> Chain:
        """Make the full blocks behind a chain known, and return the chain with them; `pages` and `tokens` are the whole
        sequence's.

        A block that is known already keeps its page, and the sequence's own stays private to it.
        """
        while chain.num_blocks < min(len(tokens) // self.block_tokens, len(pages)):
            page, chain = pages[chain.num_blocks], self._longer(chain, tokens)
            if chain.key not in self._page and page not in self._hash:
                self._page[chain.key] = page
                self._hash[page] = chain.key
        return chain

    def evict(self, num_pages: int) -> list[int]:
        """Forget the blocks that were unused longest; returns their pages."""
        gone = [self._unused.popitem(last=False)[0] for _ in range(min(num_pages, len(self._unused)))]
        for page in gone:
            del self._page[self._hash.pop(page)]
        return gone

    def check_integrity(self) -> None:
        """Assert that known pages are used or unused, and never both."""
        assert {page: key for key, page in self._page.items()} == self._hash
        assert self._unused.keys().isdisjoint(self._users)
        assert set(self._unused) <= set(self._hash)
        assert all(users > 0 for users in self._users.values())
        assert set(self._hash) <= self._users.keys() | self._unused.keys()

    def _longer(self, chain: Chain, tokens: Sequence[int]) -> Chain:
        """The chain with one block more."""
        start = chain.num_blocks * self.block_tokens
        ids = array("q", tokens[start : start + self.block_tokens])
        return Chain(num_blocks=chain.num_blocks + 1, key=blake2b(chain.key + ids.tobytes(), digest_size=16).digest())
