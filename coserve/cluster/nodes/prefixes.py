"""What the caches of nodes hold of prompts' beginnings, as far as a front can know: what it sent
where.

A node's engine finds blocks by keys of its own, which begin with versions of adapters that only it
knows, and says nothing of what it forgets. So a front keeps the keys of prompts that it sent to a
node, as many as the node's pool has pages, those used last. It is wrong where a node has needed
pages for something else, or has got a new version of an adapter since: then a prompt takes as long
as it would on any other node.
"""

from collections import OrderedDict
from collections.abc import Sequence

from coserve.engine.commands import AddRequest
from coserve.memory.pages.prefix_index import PrefixIndex, PrefixOwner

# Of a prompt, the blocks that are looked at: with these in common two prompts belong together,
# whatever follows. And of a node, those that are remembered.
_MOST_OF_PROMPT, _MOST_OF_NODE = 256, 4096


def prefix_keys(request: AddRequest, block_tokens: int) -> tuple[bytes, ...]:
    """Return the keys of a prompt's first full blocks; none if it is computed from its beginning in
    any case.
    """
    if request.params.prompt_logprobs is not None:
        return ()
    adapter = request.adapter
    version = "" if adapter is None else f"{adapter.name}\0{adapter.directory}"
    tokens = request.prompt[: _MOST_OF_PROMPT * block_tokens]
    owner = PrefixOwner(f"{version}\0{request.params.cache_salt}", request.tenant)
    if adapter is None:
        owner = owner._replace(num_public_tokens=request.params.num_public_tokens)
    return tuple(PrefixIndex(block_tokens).keys(owner, tokens))


class SentPrefixes:
    """Keys of one node, while its engine lives."""

    def __init__(self, num_pages: int) -> None:
        """num_pages: of the node's pool."""
        self._most = min(num_pages, _MOST_OF_NODE)
        self._used: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._keys: frozenset[bytes] | None = None

    @property
    def keys(self) -> frozenset[bytes]:
        """All of them as of now."""
        if self._keys is None:
            self._keys = frozenset(self._used)
        return self._keys

    def use(self, keys: Sequence[bytes]) -> None:
        """A prompt with these keys was sent there."""
        if not keys:
            return
        # A prompt's end is of less use to others than its beginning: it goes first.
        for key in reversed(keys[: self._most]):
            self._used[key] = None
            self._used.move_to_end(key)
        while len(self._used) > self._most:
            self._used.popitem(last=False)
        self._keys = None
