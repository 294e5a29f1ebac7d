"""Estimate of the prompt prefixes that nodes have cached: those that a front has sent there.

A node's engine finds blocks by keys of its own, which begin with versions of adapters that it alone
counts, and does not report what it evicts. So a front keeps the keys of prompts that it sent to a
node, as many as the node's pool has pages, those used last. The estimate is wrong where a node has
needed pages for something else, or has a new version of an adapter: then a prompt takes as long as
it would on any other node.
"""

from collections import OrderedDict
from collections.abc import Sequence

from coserve.engine.commands import AddRequest
from coserve.memory.pages.prefix_index import PrefixIndex, PrefixOwner

# Number of a prompt's blocks that are looked at: prompts that share these belong together, whatever
# follows.
_MAX_PROMPT_BLOCKS = 256
# Number of blocks that are remembered of a node.
_MAX_NODE_BLOCKS = 4096


def prefix_keys(request: AddRequest, block_tokens: int) -> tuple[bytes, ...]:
    """Return the keys of a prompt's first full blocks; none if it is computed from its beginning in
    any case.
    """
    if request.params.prompt_logprobs is not None:
        return ()
    adapter = request.adapter
    version = "" if adapter is None else f"{adapter.name}\0{adapter.directory}"
    tokens = request.prompt[: _MAX_PROMPT_BLOCKS * block_tokens]
    owner = PrefixOwner(f"{version}\0{request.params.cache_salt}", request.tenant)
    if adapter is None:
        owner = owner._replace(num_public_tokens=request.params.num_public_tokens)
    return tuple(PrefixIndex(block_tokens).keys(owner, tokens))


class SentPrefixes:
    """Keys of the prompts that were sent to one node, while its engine lives."""

    def __init__(self, num_pages: int) -> None:
        """Begin without keys. num_pages: size of the node's pool."""
        self._most = min(num_pages, _MAX_NODE_BLOCKS)
        self._used: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._keys: frozenset[bytes] | None = None

    @property
    def keys(self) -> frozenset[bytes]:
        """All keys as of now."""
        if self._keys is None:
            self._keys = frozenset(self._used)
        return self._keys

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that a prompt with these keys was sent to the node."""
        if not keys:
            return
        # A prompt's end is of less use to others than its beginning: it goes first.
        for key in reversed(keys[: self._most]):
            self._used[key] = None
            self._used.move_to_end(key)
        while len(self._used) > self._most:
            self._used.popitem(last=False)
        self._keys = None
