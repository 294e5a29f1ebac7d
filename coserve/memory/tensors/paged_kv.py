"""Tensors of the page pool: raw pages, and in them the keys and values of every block of the model.

A page holds `block_tokens` tokens of all blocks with attention, laid out [blocks, 2, block_tokens,
Hkv * D] in the compute dtype. Where other blocks carry a state, the first pages of a request hold
that (`coserve.memory.tensors.paged_states`). Callers bring page numbers, which
`coserve.memory.pages.kv_cache` gives out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import le
from typing import TypeAlias

import torch
from torch import Tensor

from coserve.graph.states import StateRows
from coserve.kernels.attention import PageTables, SegmentTable
from coserve.kernels.groups.base import Ranks
from coserve.kernels.trace import TracedPiece
from coserve.kernels.transfer import int_tensor, on_device
from coserve.memory.tensors.paged_states import PagedStates, num_state_pages, state_runs
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import Keep, RowGroup, RowSpan, forward
from coserve.models.bypasses import Bypasses
from coserve.models.local import LocalModel, local_model
from coserve.models.traced import InPages, PageStores

# Pages that are copied to other places at once.
_PAGES_PER_COPY = 16


def kv_page_bytes(backbone: Backbone, block_tokens: int) -> int:
    """Return the bytes of a page as this rank has it."""
    return _page_bytes(backbone.local, backbone.dtype, block_tokens)


def whole_page_bytes(backbone: Backbone, block_tokens: int) -> int:
    """Return the bytes that a page has where one rank holds the model."""
    return _page_bytes(local_model(backbone.architecture, Ranks()), backbone.dtype, block_tokens)


def _page_bytes(local: LocalModel, dtype: torch.dtype, block_tokens: int) -> int:
    # Keys and values of one token of one layer.
    per_token = sum(local.kv_widths) * dtype.itemsize
    return -(-len(local.kv_layers) * per_token * block_tokens // 64) * 64


SequenceRows: TypeAlias = tuple[Sequence[int], int, Sequence[int]]
"""Rows of one sequence that are to run: the pages of its states, if it has any, and of its keys and
values, at least as many as they need (an array goes to a kernel as it lies); the position of the
first row; the rows' tokens."""


class PagedKv:
    """All pages of a device."""

    def __init__(self, backbone: Backbone, *, num_pages: int, block_tokens: int) -> None:
        """Take the memory of the pages."""
        self.backbone, self.num_pages, self.block_tokens = backbone, num_pages, block_tokens
        self.page_bytes = kv_page_bytes(backbone, block_tokens)
        # uint8 [num_pages, page_bytes]
        self.storage = torch.empty(
            num_pages, self.page_bytes, dtype=torch.uint8, device=backbone.device
        )
        self.may_run_at_once = True
        """Whether blocks may run as one call on rows in these pages, where they can."""
        self.num_state_pages = num_state_pages(backbone.local, self.page_bytes)
        layers, width = backbone.local.kv_layers, backbone.local.kv_widths[0]
        # Bytes of a page that keys and values use; the rest pads it to a multiple of 64.
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

    def rows(self, sequences: Sequence[SequenceRows], bypasses: Bypasses | None = None) -> RowSpan:
        """Return a span of the rows of sequences that use one adapter."""
        return _PagedRows(
            self,
            PageTables([pages for pages, _, _ in sequences]),
            [start for _, start, _ in sequences],
            [tokens for *_, tokens in sequences],
            bypasses,
        )

    def spans(
        self,
        tables: PageTables,
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        users: Sequence[tuple[int, Bypasses | None]],
    ) -> list[RowSpan]:
        """Return spans of the rows of sequences (see `SequenceRows`), one for each adapter.

        Args:
            tables: Pages of each sequence.
            starts: Position of each sequence's first row.
            tokens: Tokens of each sequence's rows.
            users: Number of neighbouring sequences and their adapter, in the order of the
                sequences.
        """
        spans: list[RowSpan] = []
        first = 0
        for number, bypasses in users:
            own = slice(first, first + number)
            spans.append(_PagedRows(self, tables, starts[own], tokens[own], bypasses))
            first += number
        return spans

    @torch.inference_mode()
    def capture(self) -> None:
        """Run decode steps, and steps with pieces of prompts, where the backend captures them.

        It captures none for several ranks. Page 0 is written to.
        """
        backbone = self.backbone
        if self.num_state_pages or backbone.block_rows is not None or backbone.ranks.size > 1:
            return
        for number in backbone.backend.captured_rows:
            forward(backbone, [self.rows([([0], 0, [0])] * number)])
        for number in backbone.backend.captured_prompts:
            if number < backbone.architecture.max_positions:
                forward(
                    backbone,
                    [self.rows([([0] * (1 + number // self.block_tokens), 0, [0] * number)])],
                )

    def move(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to others, none of which is among them.

        Some pages at a time, since they pass through spare memory.
        """
        for start in range(0, len(pages), _PAGES_PER_COPY):
            part = slice(start, start + _PAGES_PER_COPY)
            sources, places = on_device(
                [list(pages[part]), list(targets[part])], self.storage.device
            ).unbind()
            self.storage[places] = self.storage[sources]

    def run(self, first_page: int, num_pages: int) -> Tensor:
        """Return neighbouring pages as bytes: uint8 [num_pages * page_bytes]."""
        return self.storage[first_page : first_page + num_pages].flatten()


@dataclass(frozen=True)
class _RowsInPages:
    """Rows of one tensor in pages, as something to copy into."""

    target: Tensor
    """All pages of the tensor, [num_pages, block_tokens, width]."""
    pages: Tensor
    """Page of each row."""
    offsets: Tensor
    """Place of each row in its page."""

    def copy_(self, value: Tensor) -> None:
        self.target[self.pages, self.offsets] = value


class _PagedRows(RowSpan):
    """Next rows of some sequences."""

    def __init__(
        self,
        cache: PagedKv,
        tables: PageTables,
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        bypasses: Bypasses | None,
    ) -> None:
        """Note the rows.

        Args:
            cache: The pages.
            tables: Pages of these sequences, or of those of all spans that are made with them.
            starts: Position of each sequence's first row.
            tokens: Tokens of each sequence's rows.
            bypasses: The adapter that all of them use.
        """
        self.cache = self.group = cache
        self.tables, self.starts, self.tokens, self.bypasses = tables, starts, tokens, bypasses
        self.num_rows = sum(map(len, tokens))

    def gather(self, others: Sequence["_PagedRows"]) -> RowGroup:
        spans = (self, *others)
        # Spans that were made together share one object: mostly there is a single table.
        tables = list(dict.fromkeys([span.tables for span in spans]))
        return _CacheRows(
            self.cache,
            tables[0] if len(tables) == 1 else PageTables.joined(tables),
            [start for span in spans for start in span.starts],
            [tokens for span in spans for tokens in span.tokens],
        )


class _CacheRows(RowGroup):
    """Rows of all requests of a step, whose keys and values lie in the pages of one cache.

    Most steps have one row of each of some hundred sequences, so what is done for each sequence is
    done by tensors.
    """

    def __init__(
        self,
        cache: PagedKv,
        tables: PageTables,
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        assert len(tables) == len(starts), "the tables are those of all sequences"
        device, block = cache.backbone.device, cache.block_tokens
        self._cache, self._starts, self.block_tokens = cache, starts, block
        self._lengths = lengths = list(map(len, tokens))
        first_page, num_pages, number = tables.first_page, tables.num_pages, cache.num_state_pages
        # The first pages of a sequence hold its states; its keys and values follow.
        if number:
            self._state_tables = on_device(
                tables.pages[first_page[:, None] + torch.arange(number)], device
            )
            self._state_runs = state_runs(starts, lengths, device)
            first_page, num_pages = first_page + number, num_pages - number
        self._is_decode = lengths.count(1) == len(lengths)
        flat, num_rows = list(chain.from_iterable(tokens)), int_tensor(lengths)
        # One row each, so a row's page follows from its sequence's position alone.
        if self._is_decode:
            own = [
                table[number + start // block]
                for table, start in zip(tables.tables, starts, strict=True)
            ]
            # [3, rows]: tokens, positions and pages go to the device in one transfer.
            numbers = int_tensor([*flat, *starts, *own]).view(3, -1)
            new = [page for page, start in zip(own, starts, strict=True) if not start % block]
            num_keys = int_tensor([start + 1 for start in starts])
            # Each segment has one row, so the tables by sequence and by row are the same.
            self.segments = self._apart = _segments(
                num_rows, num_keys, first_page, num_pages, tables.pages
            )
        else:
            num_keys = int_tensor(starts) + num_rows
            needed = (num_keys + (block - 1)) // block
            assert all(map(le, needed.tolist(), num_pages.tolist())), (
                "the pages come before the rows"
            )
            self.segments = _segments(num_rows, num_keys, first_page, needed, tables.pages)
            # The same with a segment for each row. before: position of a row less its index here.
            before, first_page, needed = (
                each.repeat_interleave(num_rows)
                for each in (num_keys - num_rows.cumsum(0), first_page, needed)
            )
            positions = before + torch.arange(len(flat))
            self._apart = _segments(
                torch.ones_like(positions), positions + 1, first_page, needed, tables.pages
            )
            # Page of each row: the tables are one flat list, in which `first_page` is an index.
            pages = tables.pages[first_page + positions // block]
            numbers = torch.stack([int_tensor(flat), positions, pages])
            new = [
                page
                for page, offset in zip(pages.tolist(), (positions % block).tolist(), strict=True)
                if not offset
            ]
        if cache.backbone.block_rows is not None:  # results must not depend on how a prompt is cut
            self.segments = self._apart
        self.tokens, self.positions, self._pages = on_device(numbers, device).unbind()
        self._offsets = self.positions % block
        # Kernels may read what lies after the last row of a page, with a weight of zero: it must be
        # finite. Rows at the beginning of a page are the first to write to it.
        if new:
            cache.pages[:, :, on_device(int_tensor(new), device)] = 0

    @property
    def in_pages(self) -> InPages | None:
        cache = self._cache
        # Traces of whole passes cover keys and values, not states.
        if not cache.may_run_at_once or cache.num_state_pages:
            return None
        return InPages(
            stores=cache.stores,
            pages=self._pages,
            offsets=self._offsets,
            pieces=() if self._is_decode else self._pieces(),
            segments=None if self._is_decode else lambda: self._apart,
        )

    def _pieces(self) -> list[TracedPiece]:
        """Return the rows of sequences with several, by where they stand among all rows."""
        return [
            TracedPiece(first_row=end - length, num_rows=length, num_keys=start + length)
            for end, length, start in zip(
                accumulate(self._lengths), self._lengths, self._starts, strict=True
            )
            if length > 1
        ]

    def keep(self, part: Part) -> Keep:
        return _keep(self._cache, part, self._pages, self._offsets)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._cache.stores.layers[layer]

    def states(self, layer: int) -> StateRows:
        cache = self._cache
        store = PagedStates(cache.storage, self._state_tables, cache.backbone.local, layer)
        return StateRows(rows=slice(None), runs=self._state_runs, store=store)


def _segments(
    num_rows: Tensor, num_keys: Tensor, first_page: Tensor, num_pages: Tensor, pages: Tensor
) -> SegmentTable:
    """Return segments whose keys begin with a page."""
    return SegmentTable(
        num_rows=num_rows,
        num_keys=num_keys,
        first_key=None,
        first_page=first_page,
        num_pages=num_pages,
        pages=pages,
    )


def _keep(cache: PagedKv, part: Part, pages: Tensor, offsets: Tensor) -> Keep:
    """Return the places in pages for keys and values of a block's rows."""
    if part not in cache.stores.layers:
        return Keep()
    names = cache.backbone.local.graphs[part].kv_tensors
    return Keep(
        rows={
            name: _RowsInPages(x, pages, offsets)
            for name, x in zip(names, cache.stores.layers[part], strict=True)
        }
    )
