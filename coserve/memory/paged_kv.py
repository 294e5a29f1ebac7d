"""The page pool's tensors: raw pages, and in them keys and values of every block of the model.

A page holds `block_tokens` tokens of all blocks, laid out [num_layers, 2, block_tokens, Hkv * D] in the compute dtype.
Which pages are whose is not known here: callers bring page numbers (`coserve.memory.kv_cache` gives them out).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.attention import Segment
from coserve.kernels.transfer import on_device
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import BatchRows, Keep, Span
from coserve.models.bypasses import Bypasses


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

    def rows(self, pages: Sequence[int], start: int, tokens: Sequence[int], bypasses: Bypasses | None = None) -> Span:
        """A span that runs tokens from position `start` on, with K and V in these pages of its sequence."""
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
    """The next rows of one sequence."""

    def __init__(
        self, cache: PagedKv, pages: Sequence[int], start: int, tokens: Sequence[int], bypasses: Bypasses | None
    ) -> None:
        self.cache = self.group = cache
        self.tokens, self.bypasses = tokens, bypasses
        self.num_rows, self.start, self.end = len(tokens), start, start + len(tokens)
        self.pages = pages[: -(-self.end // cache.block_tokens)]
        assert len(self.pages) * cache.block_tokens >= self.end, "the pages come before the rows"

    def gather(self, others: Sequence["_PagedRows"]) -> BatchRows:
        return _CacheRows(self.cache, [self, *others])


class _CacheRows(BatchRows):
    """The rows of all requests of a step, whose keys and values lie in the pages of one cache."""

    def __init__(self, cache: PagedKv, spans: Sequence[_PagedRows]) -> None:
        device, block = cache.backbone.device, cache.block_tokens
        self._cache, self.block_tokens = cache, block
        tokens = [token for span in spans for token in span.tokens]
        if {span.num_rows for span in spans} == {1}:  # some hundred requests that decode: without ranges
            positions, pages = [span.start for span in spans], [span.pages[-1] for span in spans]
        else:
            positions = [position for span in spans for position in range(span.start, span.end)]
            pages = [span.pages[position // block] for span in spans for position in range(span.start, span.end)]
        self.tokens, self.positions, self._pages = on_device([tokens, positions, pages], device).unbind()
        self._offsets = self.positions % block
        if cache.backbone.block_rows is None:
            self.segments = [Segment(num_rows=span.num_rows, num_keys=span.end, pages=span.pages) for span in spans]
        else:
            self.segments = [segment for span in spans for segment in self._row_by_row(span)]
        # Of pages that rows are the first to write to, what lies after the rows must be finite: kernels may read that,
        # and give it no weight.
        if new := [page for span in spans for page in span.pages[-(-span.start // block) :]]:
            cache.pages[:, :, on_device(new, device)] = 0

    def _row_by_row(self, span: _PagedRows) -> list[Segment]:
        """One for each row: results must not depend on how a prompt is cut."""
        block, pages = self.block_tokens, span.pages
        ends = range(span.start + 1, span.end + 1)
        return [Segment(num_rows=1, num_keys=end, pages=pages[: -(-end // block)]) for end in ends]

    def keep(self, part: Part) -> Keep:
        return _keep(self._cache, part, self._pages, self._offsets)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.pages[layer]
        return keys, values


def _keep(cache: PagedKv, part: Part, pages: Tensor, offsets: Tensor) -> Keep:
    """K and V of a block's rows into their places."""
    if not isinstance(part, int):
        return Keep()
    names = cache.backbone.architecture.graphs[part].kv_tensors
    return Keep(rows={name: _Rows(x, pages, offsets) for name, x in zip(names, cache.pages[part], strict=True)})
