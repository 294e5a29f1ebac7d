"""Keys and values of requests in pages: a page holds `block_tokens` tokens of every block's K and V.

A page is laid out [num_layers, 2, block_tokens, Hkv * D] in the compute dtype.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.errors import BudgetError
from coserve.graph.operators.attention import PagedSegment, Segment
from coserve.kernels.attention import PageTable
from coserve.memory.pages import PagePool
from coserve.memory.prefix_index import Chain, PrefixIndex
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import Bypasses, Keep, Span

OWNER = "kv"


def kv_page_bytes(backbone: Backbone, block_tokens: int) -> int:
    """Bytes of a page, for a pool."""
    graph = backbone.architecture.graphs[0]
    per_token = sum(graph.spec[name].num_bytes(backbone.dtype) for name in graph.kv_tensors)
    return -(-backbone.architecture.num_layers * per_token * block_tokens // 64) * 64


class KvCache:
    """Sequences' pages in a pool, and the beginnings that they share."""

    def __init__(self, backbone: Backbone, pool: PagePool, *, block_tokens: int = 16) -> None:
        if pool.page_bytes != (needed := kv_page_bytes(backbone, block_tokens)):
            raise BudgetError(f"{block_tokens} tokens of {backbone.name} need pages of {needed} bytes")
        self.backbone, self.pool, self.block_tokens = backbone, pool, block_tokens
        self.prefixes = PrefixIndex(block_tokens)
        graph = backbone.architecture.graphs[0]
        width = graph.spec[graph.kv_tensors[0]].shape[0]
        num_layers = backbone.architecture.num_layers
        used = num_layers * 2 * block_tokens * width * backbone.dtype.itemsize
        # [num_layers, 2, num_pages, block_tokens, Hkv * D], a view of the pool.
        self.pages = (
            pool.storage[:, :used]
            .view(backbone.dtype)
            .view(pool.num_pages, num_layers, 2, block_tokens, width)
            .permute(1, 2, 0, 3, 4)
        )

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
    """The pages of one request; `length` tokens of it have been run.

    Bookkeeping alone, but for `rows`: whoever counts pages need not have tensors.
    """

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

    def rows(self, tokens: Tensor, bypasses: Bypasses | None = None) -> Span:
        """A span that runs the next tokens (int64 [n]) into reserved pages; `commit` must follow the batch."""
        assert not self.num_pages_missing(tokens.shape[0]), "the pages are reserved first"
        return _PagedRows(self, tokens, bypasses)

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


@dataclass(frozen=True)
class _Rows:
    """Rows of one tensor in pages, as something to copy into."""

    target: Tensor  # [num_pages, block_tokens, width]
    pages: Tensor
    offsets: Tensor

    def copy_(self, value: Tensor) -> None:
        self.target[self.pages, self.offsets] = value


class _PagedRows(Span):
    def __init__(self, sequence: PagedSequence, tokens: Tensor, bypasses: Bypasses | None) -> None:
        cache, device = sequence.cache, sequence.cache.backbone.device
        start, end = sequence.length, sequence.length + tokens.shape[0]
        self.tokens, self.bypasses = tokens.to(device), bypasses
        self.positions = torch.arange(start, end, device=device)
        self.cache, self.end = cache, end
        self._sequence, self._pages = sequence, sequence.pages
        self.pages = sequence.pages[: cache.num_pages(end)]
        self._table = torch.tensor(self.pages, device=device)
        self.place = self._table[self.positions // cache.block_tokens], self.positions % cache.block_tokens
        last, used = divmod(end - 1, cache.block_tokens)
        if (
            start <= last * cache.block_tokens
        ):  # it begins its last page: what lies there behind its tokens must be finite
            cache.pages[:, :, sequence.pages[last], used + 1 :] = 0

    def check_open(self) -> None:
        assert self._sequence.pages is self._pages, "the sequence was closed"

    def keep(self, part: Part) -> Keep:
        self.check_open()
        return _keep(self.cache, part, *self.place)

    @property
    def kin(self) -> Hashable:
        return self.cache if self.tokens.shape[0] == 1 else None

    def joined(self, others: Sequence["_PagedRows"]) -> Span:
        return _LastRows(self.cache, [self, *others])

    def segments(self, layer: int) -> Sequence[Segment]:
        keys, values = self.cache.pages[layer]
        return [
            Segment(
                rows=slice(0, self.tokens.shape[0]),
                keys=lambda: self._gather(keys),
                values=lambda: self._gather(values),
            )
        ]

    def _gather(self, pages: Tensor) -> Tensor:
        """[num_pages, block_tokens, width] -> the sequence's rows [end, width]."""
        return pages.index_select(0, self._table).flatten(0, 1)[: self.end]


class _LastRows(Span):
    """The last rows of several sequences, such as the tokens that are decoded in a step."""

    def __init__(self, cache: KvCache, spans: Sequence[_PagedRows]) -> None:
        self.tokens, self.positions = (torch.cat([getattr(s, name) for s in spans]) for name in ("tokens", "positions"))
        self._cache, self._spans = cache, spans
        self._place = [torch.cat(parts) for parts in zip(*(span.place for span in spans), strict=True)]
        self._table = PageTable([s.pages for s in spans], [s.end for s in spans], cache.backbone.device)

    def keep(self, part: Part) -> Keep:
        for span in self._spans:
            span.check_open()
        return _keep(self._cache, part, *self._place)

    def segments(self, layer: int) -> Sequence[PagedSegment]:
        keys, values = self._cache.pages[layer]
        return [PagedSegment(rows=slice(0, len(self._spans)), keys=keys, values=values, table=self._table)]


def _keep(cache: KvCache, part: Part, pages: Tensor, offsets: Tensor) -> Keep:
    """K and V of a block's rows into their places."""
    if not isinstance(part, int):
        return Keep()
    names = cache.backbone.architecture.graphs[part].kv_tensors
    return Keep(rows={name: _Rows(x, pages, offsets) for name, x in zip(names, cache.pages[part], strict=True)})
