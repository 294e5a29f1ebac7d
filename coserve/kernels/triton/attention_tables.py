"""Tables on the device of the keys that the rows of a batch attend to, made once for all layers of
a step.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionRoom, Segment, SegmentTable
from coserve.kernels.plain.attention import PlainAttentionBatch
from coserve.kernels.transfer import int_tensor, on_device

# Numbers of a segment (see `attention_kernels`).
SEGMENT_NUMBERS = 5
# Programs among which the keys of a row that is alone are divided, where nothing else says how
# many.
SPLITS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleRows:
    """Segments of one row each."""

    segments: Tensor
    """Segments, int64 [n, 5]; those without rows do nothing."""
    pages: Tensor
    """Pages of all segments end to end, int64."""
    splits: int
    """Programs for each row and key head."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cumulative:
    """Segments as numbers of rows and keys up to each of them."""

    rows: Tensor
    """Number of rows up to each segment, int32 [segments + 1]."""
    keys: Tensor
    """Number of keys up to each segment, int32 [segments + 1]."""
    max_rows: int
    """Maximum number of rows of a segment."""
    max_keys: int
    """Maximum number of keys of a segment."""
    of_store: slice
    """The segments' keys among those of the store."""


class StaticSingleRows(AttentionBatch):
    """A stand-in for the segments of one row of any step, whose `rows` hold theirs when they are
    read.

    Args:
        num_rows: maximum number of rows.
        pages: room for the pages of a step.
        splits: programs for each row and key head.
    """

    def __init__(self, num_rows: int, pages: Tensor, splits: int) -> None:
        segments = torch.zeros(num_rows, SEGMENT_NUMBERS, dtype=torch.int64, device=pages.device)
        self.rows = SingleRows(segments=segments, pages=pages, splits=splits)
        self._num_filled = 0

    @property
    def num_rows(self) -> int:
        return self.rows.segments.shape[0]

    def fill(self, batch: AttentionBatch) -> None:
        """Fill it with the segments of one row of a batch, and the pages of all."""
        assert isinstance(batch, TritonAttentionBatch)
        segments, single = self.rows.segments, batch.single
        n = 0 if single is None else single.segments.shape[0]
        if single is not None:
            segments[:n].copy_(single.segments)
        self.rows.pages[: batch.pages.shape[0]].copy_(batch.pages)
        if n < self._num_filled:
            # Without rows, the segments of the step before do nothing.
            segments[n : self._num_filled].zero_()
        self._num_filled = n


class TritonAttentionBatch(AttentionBatch):
    """Segments of one row (decoding), and those of several."""

    def __init__(
        self, segments: Sequence[Segment], block_tokens: int, device: torch.device
    ) -> None:
        self._segments, self._block_tokens, self._device = (
            SegmentTable.of(segments),
            block_tokens,
            device,
        )
        self._tiles: dict[tuple[str, int], Tensor] = {}

    @property
    def num_rows(self) -> int:
        return self._segments.total_rows

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def is_single(self) -> bool:
        """Return whether each segment has one row."""
        return self._segments.is_single

    @cached_property
    def plain(self) -> PlainAttentionBatch:
        """Return the batch for the plain backend, which runs what the kernels are not for."""
        return PlainAttentionBatch(self._segments, self._block_tokens, self._device)

    @property
    def segments(self) -> Tensor:
        """Return all segments, int64 [segments, 5]."""
        return self._tables[0]

    @property
    def pages(self) -> Tensor:
        """Return the pages of all segments, end to end."""
        return self._tables[1]

    @cached_property
    def single(self) -> SingleRows | None:
        """Return the segments of one row; None: there are none."""
        own = [
            index for index, length in enumerate(self._segments.num_rows.tolist()) if length == 1
        ]
        if not own:
            return None
        rows = self.segments if self.is_single else self.segments[on_device(own, self._device)]
        return SingleRows(segments=rows, pages=self.pages, splits=SPLITS)

    def tiles(self, kind: str, size: int) -> Tensor:
        """Return tiles of this many rows or keys, int64 [tiles, 2].

        Args:
            kind: "rows"; "several": rows of segments that have several; or "keys".
        """
        # Once per step, whatever the number of layers.
        if (kind, size) not in self._tiles:
            numbers, table = array("q"), self._segments
            for index, number in enumerate(
                (table.num_keys if kind == "keys" else table.num_rows).tolist()
            ):
                if kind != "several" or number > 1:
                    for first in range(0, number, size):
                        numbers.extend((index, first))
            self._tiles[kind, size] = on_device(int_tensor(numbers), self._device).view(-1, 2)
        return self._tiles[kind, size]

    @cached_property
    def cumulative(self) -> "Cumulative | None":
        """Return the segments as PyTorch's FlashAttention takes them; None where their keys do not
        stand one after another.
        """
        rows, keys, first = array("i", [0]), array("i", [0]), self._segments[0].first_key
        for segment in self._segments:
            # FlashAttention has only cumulative numbers: keys of neighbours must touch.
            if segment.first_key != first + keys[-1]:
                return None
            rows.append(rows[-1] + segment.num_rows)
            keys.append(keys[-1] + segment.num_keys)
        ends = on_device(torch.frombuffer(rows + keys, dtype=torch.int32), self._device)
        return Cumulative(
            rows=ends[: len(rows)],
            keys=ends[len(rows) :],
            max_rows=max(segment.num_rows for segment in self._segments),
            max_keys=max(segment.num_keys for segment in self._segments),
            of_store=slice(first, first + keys[-1]),
        )

    @cached_property
    def keys_are_apart(self) -> bool:
        """Return whether no key of a store of one page is in two segments, so that sums of
        gradients have one owner each.
        """
        spans = sorted((each.first_key, each.first_key + each.num_keys) for each in self._segments)
        return all(end <= start for (_, end), (start, _) in pairwise(spans))

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return segments and pages, which are copied to the device as one."""
        table, columns = (
            self._segments,
            torch.zeros(len(self._segments) + 1, SEGMENT_NUMBERS, dtype=torch.int64),
        )
        # First row of each; the extra row of zeros at the end serves as padding below.
        columns[:-1, 0] = table.num_rows.cumsum(0) - table.num_rows
        for place, column in enumerate(
            (table.num_rows, table.num_keys, table.first_key, table.first_page), start=1
        ):
            if column is not None:
                columns[:-1, place] = column
        size = SEGMENT_NUMBERS * len(table)
        start = (
            size + size % 2
        )  # kernels are compiled apart for addresses that are no multiples of 16
        both = on_device(torch.cat([columns.flatten()[:start], table.pages]), self._device)
        return both[:size].view(-1, SEGMENT_NUMBERS), both[start:]


class _TiledRoom(AttentionBatch):
    """Room for the segments of one batch after another, and their tiles. Tiles that a batch does
    not use are tiles of a last segment without rows.
    """

    def __init__(
        self, num_rows: int, num_keys: int, num_segments: int, device: torch.device
    ) -> None:
        self._num_rows, self._num_keys, self._num_segments = num_rows, num_keys, num_segments
        self.segments = torch.zeros(
            num_segments + 1, SEGMENT_NUMBERS, dtype=torch.int64, device=device
        )
        self._tiles: dict[tuple[str, int], Tensor] = {}
        self._batch: TritonAttentionBatch | None = None

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def fill(self, batch: AttentionBatch) -> None:
        """Fill it with the segments of a batch."""
        assert isinstance(batch, TritonAttentionBatch)
        # Each call that has this room fills it; the tables of a batch are copied only once.
        if batch is self._batch:
            return
        assert batch.num_rows <= self._num_rows and batch.segments.shape[0] <= self._num_segments
        self._batch = batch
        self.segments[: batch.segments.shape[0]].copy_(batch.segments)
        for kind, size in self._tiles:
            self._fill_tiles(kind, size)

    def tiles(self, kind: str, size: int) -> Tensor:
        """Return the room's tiles of a kind and size, as a batch has them."""
        if (kind, size) not in self._tiles:
            # Each segment has at most one tile that is not full.
            most = (
                self._num_keys if kind == "keys" else self._num_rows
            ) // size + self._num_segments
            self._tiles[kind, size] = torch.zeros(
                most, 2, dtype=torch.int64, device=self.segments.device
            )
            self._fill_tiles(kind, size)
        return self._tiles[kind, size]

    def _fill_tiles(self, kind: str, size: int) -> None:
        tiles, num_own = self._tiles[kind, size], 0
        if self._batch is not None:
            own = self._batch.tiles(kind, size)
            num_own = own.shape[0]
            tiles[:num_own].copy_(own)
        tiles[num_own:].fill_(self._num_segments)


class TritonAttentionRoom(_TiledRoom, AttentionRoom):
    """Room for segments in stores of one page."""

    single: SingleRows | None = None
    """Segments of one row apart from the others; here always None."""

    @property
    def pages(self) -> Tensor:
        """Return a tensor that no kernel reads: stores have one page."""
        return self.segments


class StaticSegments(_TiledRoom):
    """A stand-in for the segments of any step, of one row or of several, whose `single` and tiles
    of "several" hold theirs when they are read. Results of rows that belong to no segment are
    undefined.
    """

    def __init__(self, num_rows: int, num_segments: int, pages: Tensor, splits: int) -> None:
        """Allocate the tables; for pages and splits see `StaticSingleRows`."""
        super().__init__(num_rows, 0, num_segments, pages.device)
        self._alone = StaticSingleRows(num_segments, pages, splits)

    @property
    def single(self) -> SingleRows:
        return self._alone.rows

    @property
    def pages(self) -> Tensor:
        return self._alone.rows.pages

    def fill(self, batch: AttentionBatch) -> None:
        super().fill(batch)
        self._alone.fill(batch)
