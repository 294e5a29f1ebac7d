"""The page pool's tensors: raw pages, and in them keys and values of every block of the model.

A page holds `block_tokens` tokens of all blocks, laid out [num_layers, 2, block_tokens, Hkv * D] in the compute dtype.
Which pages are whose is not known here: callers bring page numbers (`coserve.memory.kv_cache` gives them out).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.graph.operators.attention import PagedSegment, Segment
from coserve.kernels.attention import PageTable
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import Bypasses, Keep, Span


def kv_page_bytes(backbone: Backbone, block_tokens: int) -> int:
    """Bytes of a page, for a pool."""
    graph = backbone.architecture.graphs[0]
    per_token = sum(graph.spec[name].num_bytes(backbone.dtype) for name in graph.kv_tensors)
    return -(-backbone.architecture.num_layers * per_token * block_tokens // 64) * 64


class PagedKv:
    """All pages of a device."""

    def __init__(self, backbone: Backbone, *, num_pages: int, block_tokens: int) -> None:
        """Take the memory."""
        self.backbone, self.num_pages, self.block_tokens = backbone, num_pages, block_tokens
        self.page_bytes = kv_page_bytes(backbone, block_tokens)
        # uint8 [num_pages, page_bytes]
        self.storage = torch.empty(num_pages, self.page_bytes, dtype=torch.uint8, device=backbone.device)
        graph = backbone.architecture.graphs[0]
        width = graph.spec[graph.kv_tensors[0]].shape[0]
        num_layers = backbone.architecture.num_layers
        used = num_layers * 2 * block_tokens * width * backbone.dtype.itemsize
        # [num_layers, 2, num_pages, block_tokens, Hkv * D], a view of the storage.
        self.pages = (
            self.storage[:, :used]
            .view(backbone.dtype)
            .view(num_pages, num_layers, 2, block_tokens, width)
            .permute(1, 2, 0, 3, 4)
        )

    def rows(self, pages: Sequence[int], start: int, tokens: Tensor, bypasses: Bypasses | None = None) -> Span:
        """A span that runs tokens (int64 [n]) from position `start` on, with K and V in these pages of its sequence."""
        return _PagedRows(self, pages, start, tokens, bypasses)

    def run(self, first_page: int, num_pages: int) -> Tensor:
        """Neighbouring pages as bytes: uint8 [num_pages * page_bytes]."""
        return self.storage[first_page : first_page + num_pages].flatten()


@dataclass(frozen=True)
class _Rows:
    """Rows of one tensor in pages, as something to copy into."""

    target: Tensor  # [num_pages, block_tokens, width]
    pages: Tensor
    offsets: Tensor

    def copy_(self, value: Tensor) -> None:
        self.target[self.pages, self.offsets] = value


class _PagedRows(Span):
    def __init__(
        self, cache: PagedKv, pages: Sequence[int], start: int, tokens: Tensor, bypasses: Bypasses | None
    ) -> None:
        device, end = cache.backbone.device, start + tokens.shape[0]
        self.tokens, self.bypasses = tokens.to(device), bypasses
        self.positions = torch.arange(start, end, device=device)
        self.cache, self.end = cache, end
        self.pages = pages[: -(-end // cache.block_tokens)]
        assert len(self.pages) * cache.block_tokens >= end, "the pages come before the rows"
        self._table = torch.tensor(self.pages, device=device)
        self.place = self._table[self.positions // cache.block_tokens], self.positions % cache.block_tokens
        last, used = divmod(end - 1, cache.block_tokens)
        if (
            start <= last * cache.block_tokens
        ):  # it begins its last page: what lies there after its tokens must be finite
            cache.pages[:, :, self.pages[last], used + 1 :] = 0

    def keep(self, part: Part) -> Keep:
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

    def __init__(self, cache: PagedKv, spans: Sequence[_PagedRows]) -> None:
        self.tokens, self.positions = (torch.cat([getattr(s, name) for s in spans]) for name in ("tokens", "positions"))
        self._cache, self._spans = cache, spans
        self._place = [torch.cat(parts) for parts in zip(*(span.place for span in spans), strict=True)]
        self._table = PageTable([s.pages for s in spans], [s.end for s in spans], cache.backbone.device)

    def keep(self, part: Part) -> Keep:
        return _keep(self._cache, part, *self._place)

    def segments(self, layer: int) -> Sequence[PagedSegment]:
        keys, values = self._cache.pages[layer]
        return [PagedSegment(rows=slice(0, len(self._spans)), keys=keys, values=values, table=self._table)]


def _keep(cache: PagedKv, part: Part, pages: Tensor, offsets: Tensor) -> Keep:
    """K and V of a block's rows into their places."""
    if not isinstance(part, int):
        return Keep()
    names = cache.backbone.architecture.graphs[part].kv_tensors
    return Keep(rows={name: _Rows(x, pages, offsets) for name, x in zip(names, cache.pages[part], strict=True)})
