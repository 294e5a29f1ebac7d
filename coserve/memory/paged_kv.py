"""The page pool's tensors: raw pages, and in them keys and values of every block of the model.

A page holds `block_tokens` tokens of all blocks with attention, laid out [blocks, 2, block_tokens, Hkv * D] in the
compute dtype. Where other blocks carry a state, the first pages of a request hold that (`coserve.memory.paged_states`).
Which pages are whose is not known here: callers bring page numbers (`coserve.memory.kv_cache` gives them out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from coserve.graph.states import StateRows
from coserve.kernels.attention import Segment
from coserve.kernels.trace import TracedPiece
from coserve.kernels.transfer import int_tensor, on_device
from coserve.memory.paged_states import PagedStates, num_state_pages, state_runs
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import BatchRows, Keep, Span, forward
from coserve.models.bypasses import Bypasses
from coserve.models.traced import InPages, PageStores

# Pages that are copied to other places at once.
_PAGES_PER_COPY = 16


def kv_page_bytes(backbone: Backbone, block_tokens: int) -> int:
    """Bytes of a page, for a pool."""
    architecture = backbone.architecture
    per_token = sum(architecture.kv_widths) * backbone.dtype.itemsize
    return -(-len(architecture.kv_layers) * per_token * block_tokens // 64) * 64


# Rows of one sequence that are to run: the pages of its states, if it has any, and of its keys and values, at least as
# many as they need (an array goes to a kernel as it lies); the position of the first; their tokens.
SequenceRows: TypeAlias = tuple[Sequence[int], int, Sequence[int]]


class PagedKv:
    """All pages of a device.

    `may_run_at_once`: whether blocks may run as one call on rows in these pages, where they can.
    """

    def __init__(self, backbone: Backbone, *, num_pages: int, block_tokens: int) -> None:
        """Take the memory."""
        self.backbone, self.num_pages, self.block_tokens = backbone, num_pages, block_tokens
        self.page_bytes = kv_page_bytes(backbone, block_tokens)
        # uint8 [num_pages, page_bytes]
        self.storage = torch.empty(num_pages, self.page_bytes, dtype=torch.uint8, device=backbone.device)
        self.may_run_at_once = True
        self.num_state_pages = num_state_pages(backbone.architecture, self.page_bytes)
        layers, width = backbone.architecture.kv_layers, backbone.architecture.kv_widths[0]
        used = len(layers) * 2 * block_tokens * width * backbone.dtype.itemsize
        # [layers, 2, num_pages, block_tokens, Hkv * D], a view of the storage.
        self.pages = (
            self.storage[:, :used]
            .view(backbone.dtype)
            .view(num_pages, len(layers), 2, block_tokens, width)
            .permute(1, 2, 0, 3, 4)
        )
        # Keys and values of each layer: made once, since every step asks for all of them.
        self.stores = PageStores(
            layers={layer: (own[0], own[1]) for layer, own in zip(layers, self.pages, strict=True)}
        )

    def rows(self, sequences: Sequence[SequenceRows], bypasses: Bypasses | None = None) -> Span:
        """A span of the rows of some sequences that use one adapter."""
        return _PagedRows(self, sequences, bypasses)

    @torch.inference_mode()
    def capture(self) -> None:
        """Run steps in which requests decode, and those with pieces of prompts, where the backend captures them. Page 0
        is written to.
        """
        backbone = self.backbone
        if self.num_state_pages or backbone.block_rows is not None:
            return
        for number in backbone.backend.captured_rows:
            forward(backbone, [self.rows([([0], 0, [0])] * number)])
        for number in backbone.backend.captured_prompts:
            if number < backbone.architecture.max_positions:
                forward(backbone, [self.rows([([0] * (1 + number // self.block_tokens), 0, [0] * number)])])

    def move(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to others, none of which is among them; some at a time, as they pass through spare memory."""
        for start in range(0, len(pages), _PAGES_PER_COPY):
            part = slice(start, start + _PAGES_PER_COPY)
            sources, places = on_device([list(pages[part]), list(targets[part])], self.storage.device).unbind()
            self.storage[places] = self.storage[sources]

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
    """The next rows of some sequences."""

    def __init__(self, cache: PagedKv, sequences: Sequence[SequenceRows], bypasses: Bypasses | None) -> None:
        self.cache = self.group = cache
        self.sequences, self.bypasses = sequences, bypasses
        self.num_rows = sum([len(tokens) for _, _, tokens in sequences])

    def gather(self, others: Sequence["_PagedRows"]) -> BatchRows:
        return _CacheRows(self.cache, [each for span in (self, *others) for each in span.sequences])


class _CacheRows(BatchRows):
    """The rows of all requests of a step, whose keys and values lie in the pages of one cache.

    Most steps have one row of each of some hundred sequences: what is done for each of those is kept to the least.
    """

    def __init__(self, cache: PagedKv, sequences: Sequence[SequenceRows]) -> None:
        device, block = cache.backbone.device, cache.block_tokens
        self._cache, self.block_tokens = cache, block
        lengths = [len(tokens) for _, _, tokens in sequences]
        if number := cache.num_state_pages:
            self._state_tables = on_device([list(pages[:number]) for pages, _, _ in sequences], device)
            self._state_runs = state_runs([start for _, start, _ in sequences], lengths, device)
            sequences = [(pages[number:], start, tokens) for pages, start, tokens in sequences]
        decodes = lengths.count(1) == len(lengths)
        self._apart: Sequence[tuple[Sequence[int], int]] | None = None  # of prompts: pages and position of each row
        if decodes:
            tokens = [tokens[0] for _, _, tokens in sequences]
            positions = [start for _, start, _ in sequences]
            pages = [pages[start // block] for pages, start, _ in sequences]
            new = [page for page, start in zip(pages, positions, strict=True) if not start % block]
        else:
            tokens = [token for _, _, tokens in sequences for token in tokens]
            self._apart = places = [
                (pages, start + row) for pages, start, tokens in sequences for row in range(len(tokens))
            ]
            positions = [position for _, position in places]
            pages = [pages[position // block] for pages, position in places]
            new = [pages[position // block] for pages, position in places if not position % block]
        numbers = int_tensor([*tokens, *positions, *pages]).view(3, -1)
        self.tokens, self.positions, self._pages = on_device(numbers, device).unbind()
        self._offsets = self.positions % block
        if decodes or cache.backbone.block_rows is None:
            self.segments = [_segment(pages, start, tokens, block) for pages, start, tokens in sequences]
        else:  # one for each row: results must not depend on how a prompt is cut
            self.segments = self._segments_apart()
        # Of pages that rows are the first to write to, what lies after the rows must be finite: kernels may read that,
        # and give it no weight.
        if new:
            cache.pages[:, :, on_device(int_tensor(new), device)] = 0

    @property
    def in_pages(self) -> InPages | None:
        cache, is_decode = self._cache, self._apart is None
        if not cache.may_run_at_once or cache.num_state_pages:  # a trace knows of keys and values alone
            return None
        return InPages(
            stores=cache.stores,
            pages=self._pages,
            offsets=self._offsets,
            pieces=() if is_decode else _pieces(self.segments),
            segments=None if is_decode else self._segments_apart,
        )

    def _segments_apart(self) -> list[Segment]:
        return [_segment(pages, position, (0,), self.block_tokens) for pages, position in self._apart or ()]

    def keep(self, part: Part) -> Keep:
        return _keep(self._cache, part, self._pages, self._offsets)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._cache.stores.layers[layer]

    def states(self, layer: int) -> StateRows:
        cache = self._cache
        store = PagedStates(cache.storage, self._state_tables, cache.backbone.architecture, layer)
        return StateRows(rows=slice(None), runs=self._state_runs, store=store)


def _pieces(segments: Sequence[Segment]) -> list[TracedPiece]:
    """Segments of several rows, and where they stand among the rows of all."""
    starts = accumulate((each.num_rows for each in segments), initial=0)
    return [
        TracedPiece(first_row=start, num_rows=each.num_rows, num_keys=each.num_keys)
        for start, each in zip(starts, segments, strict=False)
        if each.num_rows > 1
    ]


def _segment(pages: Sequence[int], start: int, tokens: Sequence[int], block_tokens: int) -> Segment:
    num_keys = start + len(tokens)
    num_pages = -(-num_keys // block_tokens)
    if len(pages) != num_pages:
        pages = pages[:num_pages]
        assert len(pages) == num_pages, "the pages come before the rows"
    return Segment(num_rows=len(tokens), num_keys=num_keys, pages=pages)


def _keep(cache: PagedKv, part: Part, pages: Tensor, offsets: Tensor) -> Keep:
    """K and V of a block's rows into their places."""
    if part not in cache.stores.layers:
        return Keep()
    names = cache.backbone.architecture.graphs[part].kv_tensors
    return Keep(rows={name: _Rows(x, pages, offsets) for name, x in zip(names, cache.stores.layers[part], strict=True)})
