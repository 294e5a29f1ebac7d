"""Index of the pages that hold keys and values of full blocks of tokens, which requests with the
same prefix share.

A block is found by a hash of its tokens and all tokens before it, which begins with the adapter
version, so that an entry is never found under another version. Where tenants do not share prefixes,
the tenant is part of the hash from the first block on that is not public: no other tenant finds
these blocks, nor learns from time or counts that they are there. Blocks are counted by their users;
those that no request uses stay until their page is needed, and the one unused longest is evicted
first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, KeysView, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple


class PrefixOwner(NamedTuple):
    """Group of requests that may share a prefix."""

    version: str
    """Adapter version that keys and values are computed with, and a salt that a request brings."""
    tenant: str = ""
    """Tenant that they belong to; "": all tenants."""
    num_public_tokens: int = 0
    """Tokens at the beginning that all tenants share, whatever the tenant."""


class PrefixIndex:
    """Pages by the blocks that they hold.

    It owns no page: the cache above it takes and frees them.
    """

    def __init__(self, block_tokens: int, *, shares: bool = True) -> None:
        """Begin without blocks.

        Args:
            block_tokens: Tokens of a block.
            shares: Whether there are prefixes at all; otherwise no block has a key.
        """
        self.block_tokens, self.shares = block_tokens, shares
        self._page: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        # Unused pages, the longest unused first, with `num_released` of the moment when they became
        # unused.
        self._unused: OrderedDict[int, int] = OrderedDict()
        self.num_released = 0
        """Number of pages that ever became unused."""
        self.num_evicted = 0
        """Number of pages whose blocks were ever forgotten."""
        self.on_evict: Callable[[Sequence[bytes], Sequence[int]], None] | None = None
        """Called with the keys and the pages of blocks that are being forgotten, while the pages
        still hold them."""

    @property
    def evictable(self) -> KeysView[int]:
        """Return the pages that no request uses."""
        return self._unused.keys()

    @property
    def num_evictable(self) -> int:
        """Return the number of pages that no request uses."""
        return len(self._unused)

    def keys(
        self, owner: PrefixOwner, tokens: Sequence[int], known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the key of every full block of an owner's tokens.

        Args:
            owner: Owner of the requests that may share the blocks.
            tokens: All tokens.
            known: Keys of the first blocks, which are not computed again.
        """
        if not self.shares:
            return []
        keys = list(known)
        # A chain of hashes that starts from the version; `person` keeps the kinds of hash apart.
        key = (
            keys[-1]
            if keys
            else blake2b(owner.version.encode(), digest_size=16, person=b"version").digest()
        )
        # Index of the first block that other tenants must not find; -1: all may find all blocks.
        private = owner.num_public_tokens // self.block_tokens if owner.tenant else -1
        # Eight bytes for each token, so that a block is a slice of fixed size.
        unknown = array("q", tokens[len(keys) * self.block_tokens :])
        ids, size = unknown.tobytes(), unknown.itemsize * self.block_tokens
        for start in range(0, len(ids) - size + 1, size):
            if len(keys) == private:
                key = blake2b(
                    key + owner.tenant.encode(), digest_size=16, person=b"tenant"
                ).digest()
            key = blake2b(key + ids[start : start + size], digest_size=16).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the pages of the longest known prefix of a sequence, in whole blocks.

        At least one of its `num_tokens` tokens is left to compute.
        """
        pages = []
        for key in keys[: max(0, num_tokens - 1) // self.block_tokens]:
            if (page := self._page.get(key)) is None:
                break
            pages.append(page)
        return pages

    def use(self, pages: Sequence[int]) -> None:
        """Count one more user of each page."""
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self._unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> list[int]:
        """Count one user less of each page, and return those that no sequence uses and no block
        keeps.
        """
        loose = []
        # The end of a sequence is of less use to others than its beginning: it goes first.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._key:
                self._unused[page] = self.num_released
                self.num_released += 1
            else:
                loose.append(page)
        return loose

    def register(self, keys: Sequence[bytes], pages: Sequence[int], blocks: range) -> None:
        """Make full blocks of a sequence known. Keys and pages are those of the whole sequence.

        A block that is known already keeps its page, and the sequence's page stays private to it.
        """
        for block in blocks:
            key, page = keys[block], pages[block]
            if key not in self._page and page not in self._key:
                self._page[key] = page
                self._key[page] = key

    def evict(self, num_pages: int) -> list[int]:
        """Forget the blocks that were unused longest, and return their pages."""
        # The pages unused longest come first in the dict.
        gone = [page for page, _ in zip(self._unused, range(num_pages), strict=False)]
        self.evict_pages(gone)
        return gone

    def evict_pages(self, pages: Sequence[int]) -> None:
        """Forget blocks that no request uses."""
        if self.on_evict is not None and pages:
            self.on_evict([self._key[page] for page in pages], pages)
        for page in pages:
            del self._unused[page]
            del self._page[self._key.pop(page)]
            self.num_evicted += 1

    @property
    def used(self) -> KeysView[int]:
        """Return the pages that requests use."""
        return self._users.keys()

    def unused_since(self, num_released: int) -> set[int]:
        """Return the pages that no request has used since `num_released` was this."""
        # Pages are in the order of their release, so the first later one ends the search.
        return {
            page for page, _ in takewhile(lambda each: each[1] < num_released, self._unused.items())
        }

    def move(self, targets: Mapping[int, int]) -> None:
        """Note that pages of requests are others now."""
        # Only pages in use are moved; unused ones are evicted instead.
        for page, target in targets.items():
            self._users[target] = self._users.pop(page)
            if (key := self._key.pop(page, None)) is not None:
                self._key[target], self._page[key] = key, target

    def check_integrity(self) -> None:
        """Assert that known pages are used or unused, and never both."""
        assert {page: key for key, page in self._page.items()} == self._key
        assert self._unused.keys().isdisjoint(self._users)
        assert set(self._unused) <= set(self._key)
        assert all(users > 0 for users in self._users.values())
        assert set(self._key) <= self._users.keys() | self._unused.keys()
