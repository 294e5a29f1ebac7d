"""Which pages hold the keys and values of which tokens: full blocks that requests with the same
prefix share.

A block is found by a hash of its tokens and all tokens before it, which begins with the adapter
version, so that an entry can never be seen under another version. Where tenants do not share
prefixes, the tenant is part of the hash from the first block on that is not public: no other tenant
finds these blocks, nor learns from time or counts that they are there. Blocks are counted by their
users; those that no request uses stay until their page is needed, and the one unused longest goes
first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, KeysView, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple


class PrefixOwner(NamedTuple):
    """The group of requests that may share a prefix.

    Attributes:
        version: What the keys and values were computed with: an adapter version, and a salt that a
            request brings.
        tenant: The tenant that they belong to; "" for all tenants.
        num_public_tokens: Tokens at the beginning that all tenants share, whatever the tenant.
    """

    version: str
    tenant: str = ""
    num_public_tokens: int = 0


class PrefixIndex:
    """Pure bookkeeping: page numbers in, page numbers out. It owns nothing; the cache above it
    takes and returns pages.
    """

    def __init__(self, block_tokens: int, *, shares: bool = True) -> None:
        """shares: whether there are prefixes at all; otherwise no block has a key."""
        self.block_tokens, self.shares = block_tokens, shares
        self._page: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        # The longest unused first, and how many had become unused when it did.
        self._unused: OrderedDict[int, int] = OrderedDict()
        self.num_released = self.num_evicted = (
            0  # pages that ever became unused, and that were ever forgotten
        )
        # Told the keys and the pages of blocks that are being forgotten, while the pages still hold
        # them.
        self.on_evict: Callable[[Sequence[bytes], Sequence[int]], None] | None = None

    @property
    def evictable(self) -> KeysView[int]:
        """Pages that no request uses."""
        return self._unused.keys()

    @property
    def num_evictable(self) -> int:
        """How many these are."""
        return len(self._unused)

    def keys(
        self, owner: PrefixOwner, tokens: Sequence[int], known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the key of every full block of an owner's tokens; known: those of the first
        blocks.
        """
        if not self.shares:
            return []
        found = list(known)
        key = (
            found[-1]
            if found
            else blake2b(owner.version.encode(), digest_size=16, person=b"version").digest()
        )
        private = owner.num_public_tokens // self.block_tokens if owner.tenant else -1
        unknown = array("q", tokens[len(found) * self.block_tokens :])
        ids, size = unknown.tobytes(), unknown.itemsize * self.block_tokens
        for start in range(0, len(ids) - size + 1, size):
            if len(found) == private:  # from here on nobody else finds the blocks
                key = blake2b(
                    key + owner.tenant.encode(), digest_size=16, person=b"tenant"
                ).digest()
            key = blake2b(key + ids[start : start + size], digest_size=16).digest()
            found.append(key)
        return found

    def find(self, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        """Pages of the longest known prefix of a sequence of `num_tokens` tokens, in whole blocks;
        at least one token is left to compute.
        """
        pages = []
        for key in keys[: max(0, num_tokens - 1) // self.block_tokens]:
            if (page := self._page.get(key)) is None:
                break
            pages.append(page)
        return pages

    def use(self, pages: Sequence[int]) -> None:
        """Count one more user of each."""
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self._unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> list[int]:
        """Count one user less of each; returns the pages that no sequence uses and no index entry
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
        """Make these full blocks of a sequence known; keys and pages are the whole sequence's.

        A block that is known already keeps its page, and the sequence's own stays private to it.
        """
        for block in blocks:
            key, page = keys[block], pages[block]
            if key not in self._page and page not in self._key:
                self._page[key] = page
                self._key[page] = key

    def evict(self, num_pages: int) -> list[int]:
        """Forget the blocks that were unused longest; returns their pages."""
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
        """Pages that requests use."""
        return self._users.keys()

    def unused_since(self, num_released: int) -> set[int]:
        """Pages that no request has used since as many had become unused."""
        return {
            page for page, _ in takewhile(lambda each: each[1] < num_released, self._unused.items())
        }

    def move(self, targets: Mapping[int, int]) -> None:
        """Pages that requests use lie elsewhere now."""
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
