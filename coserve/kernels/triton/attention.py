"""Attention of a batch of segments: its tables on the device, made once for all layers of a step, and the launches."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionRoom, AttentionSpec, Segment
from coserve.kernels.plain.attention import PlainAttentionBatch
from coserve.kernels.transfer import on_device
from coserve.kernels.triton import attention_kernels as kernels
from coserve.kernels.triton.products import is_exact

# Numbers of a segment (see `attention_kernels`).
SEGMENT_NUMBERS = 5
# Programs among which the keys of a row that is alone are divided, where nothing else says how many.
SPLITS = 8
# The fewest queries of a tile, which matrix units take.
_LEAST_QUERIES = 16
# Of a head: a wider one would not fit.
_MOST_WIDTH = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleRows:
    """Segments of one row each. segments: int64 [n, 5], of which those without rows do nothing; pages: int64, those of
    all segments end to end; splits: programs for each row and key head.
    """

    segments: Tensor
    pages: Tensor
    splits: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Cumulative:
    """How many rows and keys there are up to each segment, int32 [segments + 1], the most of a segment, and which of a
    store's keys are theirs.
    """

    rows: Tensor
    keys: Tensor
    most_rows: int
    most_keys: int
    of_store: slice


class StaticSingleRows(AttentionBatch):
    """Stands for the segments of any step, of one row each: `rows` has theirs when it is read."""

    def __init__(self, rows: SingleRows, num_rows: int) -> None:
        self.rows, self._num_rows = rows, num_rows

    @property
    def num_rows(self) -> int:
        return self._num_rows


class TritonAttentionBatch(AttentionBatch):
    """Segments of one row (decoding), and those of several."""

    def __init__(self, segments: Sequence[Segment], block_tokens: int, device: torch.device) -> None:
        self._segments, self._block_tokens, self._device = segments, block_tokens, device
        self._num_rows = sum([segment.num_rows for segment in segments])
        self._tiles: dict[tuple[str, int], Tensor] = {}

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def is_single(self) -> bool:
        """Whether each segment has one row."""
        return len(self._segments) == self._num_rows

    @cached_property
    def plain(self) -> PlainAttentionBatch:
        """For what the kernels are not for."""
        return PlainAttentionBatch(self._segments, self._block_tokens, self._device)

    @property
    def segments(self) -> Tensor:
        """All of them, int64 [segments, 5]."""
        return self._tables[0]

    @property
    def pages(self) -> Tensor:
        """Of all segments, end to end."""
        return self._tables[1]

    @cached_property
    def single(self) -> SingleRows | None:
        """Segments of one row."""
        own = [index for index, segment in enumerate(self._segments) if segment.num_rows == 1]
        if not own:
            return None
        rows = self.segments if self.is_single else self.segments[on_device(own, self._device)]
        return SingleRows(segments=rows, pages=self.pages, splits=SPLITS)

    def tiles(self, kind: str, size: int) -> Tensor:
        """Tiles of this many rows or keys, int64 [tiles, 2]: of "rows", of the rows of segments that have "several", or
        of "keys".
        """
        if (kind, size) not in self._tiles:
            numbers = array("q")
            for index, segment in enumerate(self._segments):
                number = segment.num_keys if kind == "keys" else segment.num_rows
                if kind != "several" or number > 1:
                    for first in range(0, number, size):
                        numbers.extend((index, first))
            table = torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
            self._tiles[kind, size] = on_device(table, self._device).view(-1, 2)
        return self._tiles[kind, size]

    @cached_property
    def cumulative(self) -> "Cumulative | None":
        """Segments as PyTorch's FlashAttention takes them; None where their keys do not stand one after another."""
        rows, keys, first = array("i", [0]), array("i", [0]), self._segments[0].first_key
        for segment in self._segments:
            if segment.first_key != first + keys[-1]:
                return None
            rows.append(rows[-1] + segment.num_rows)
            keys.append(keys[-1] + segment.num_keys)
        ends = on_device(torch.frombuffer(rows + keys, dtype=torch.int32), self._device)
        return Cumulative(
            rows=ends[: len(rows)],
            keys=ends[len(rows) :],
            most_rows=max(segment.num_rows for segment in self._segments),
            most_keys=max(segment.num_keys for segment in self._segments),
            of_store=slice(first, first + keys[-1]),
        )

    @cached_property
    def keys_are_apart(self) -> bool:
        """Whether no key of a store of one page is in two segments, so that sums of gradients have one owner each."""
        spans = sorted((each.first_key, each.first_key + each.num_keys) for each in self._segments)
        return all(end <= start for (_, end), (start, _) in pairwise(spans))

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Segments and pages, which go to the device as one."""
        numbers, pages, row = array("q"), array("q"), 0
        for segment in self._segments:
            numbers.extend((row, segment.num_rows, segment.num_keys, segment.first_key, len(pages)))
            pages.extend(segment.pages)
            row += segment.num_rows
        size = len(numbers)
        if size % 2:  # kernels are compiled apart for addresses that are no multiples of 16
            numbers.append(0)
        start = len(numbers)
        both = on_device(torch.frombuffer(numbers + pages, dtype=torch.int64), self._device)
        return both[:size].view(-1, SEGMENT_NUMBERS), both[start:]


class TritonAttentionRoom(AttentionRoom):
    """See `AttentionRoom`. Tiles that a batch has no use for are those of a last segment without rows."""

    def __init__(self, num_rows: int, num_keys: int, num_segments: int, device: torch.device) -> None:
        self._num_rows, self._num_keys, self._num_segments = num_rows, num_keys, num_segments
        self.segments = torch.zeros(num_segments + 1, SEGMENT_NUMBERS, dtype=torch.int64, device=device)
        self._tiles: dict[tuple[str, int], Tensor] = {}
        self._batch: TritonAttentionBatch | None = None

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def pages(self) -> Tensor:
        """Not read: stores have one page."""
        return self.segments

    def fill(self, batch: AttentionBatch) -> None:
        assert isinstance(batch, TritonAttentionBatch)
        if batch is self._batch:
            return
        assert batch.num_rows <= self._num_rows and batch.segments.shape[0] <= self._num_segments
        self._batch = batch
        self.segments[: batch.segments.shape[0]].copy_(batch.segments)
        for kind, size in self._tiles:
            self._fill_tiles(kind, size)

    def tiles(self, kind: str, size: int) -> Tensor:
        """As those of a batch, of "rows" or "keys"."""
        if (kind, size) not in self._tiles:
            most = (self._num_keys if kind == "keys" else self._num_rows) // size + self._num_segments
            self._tiles[kind, size] = torch.zeros(most, 2, dtype=torch.int64, device=self.segments.device)
            self._fill_tiles(kind, size)
        return self._tiles[kind, size]

    def _fill_tiles(self, kind: str, size: int) -> None:
        tiles, num_own = self._tiles[kind, size], 0
        if self._batch is not None:
            own = self._batch.tiles(kind, size)
            num_own = own.shape[0]
            tiles[:num_own].copy_(own)
        tiles[num_own:].fill_(self._num_segments)


# What has segments and tiles.
Tiled = TritonAttentionBatch | TritonAttentionRoom


def forward(q: Tensor, keys: Tensor, values: Tensor, batch: Tiled, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `Backend.attention`."""
    found, given, kind = _results(q, batch), _Given(q, keys, spec), "rows"
    if isinstance(batch, TritonAttentionBatch) and (single := batch.single) is not None:
        _attend_single(q, keys, values, single, given, *found)
        kind = "several"
    tiles = batch.tiles(kind, given.block_m // given.groups)
    if tiles.shape[0]:
        kernels.attend[tiles.shape[0], given.num_key_heads, 1](
            *(q, keys, values, *found, found[1], batch.segments, tiles, batch.pages, *given.tables),
            *(q.stride(0), keys.stride(0), keys.stride(1), *given.numbers),
            **given.shape,
            **given.for_forward,
            IS_SINGLE=False,
            SPLITS=1,
            BLOCK_M=given.block_m,
            BLOCK_N=given.block_n,
            **given.launch,
        )
    return found


def forward_single(
    q: Tensor, keys: Tensor, values: Tensor, rows: SingleRows, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The same of segments of one row each."""
    found = _results(q)
    _attend_single(q, keys, values, rows, _Given(q, keys, spec), *found)
    return found


def _results(q: Tensor, batch: Tiled | None = None) -> tuple[Tensor, Tensor]:
    """Room for rows like q's, and for a float32 number of each head."""
    make = torch.zeros if isinstance(batch, TritonAttentionRoom) else torch.empty
    out = make(q.shape, dtype=q.dtype, device=q.device)
    return out, make(q.shape[:2], dtype=torch.float32, device=q.device)


def _attend_single(
    q: Tensor, keys: Tensor, values: Tensor, rows: SingleRows, given: "_Given", out: Tensor, lse: Tensor
) -> None:
    """Segments of one row, into their rows of out [n, Hq, D] and lse [n, Hq]."""
    (n, num_heads, width), num_segments = q.shape, rows.segments.shape[0]
    sums = torch.empty(n, num_heads, rows.splits, 2 + width, dtype=torch.float32, device=q.device)
    kernels.attend[num_segments, given.num_key_heads, rows.splits](
        *(q, keys, values, out, lse, sums, rows.segments, rows.segments, rows.pages, *given.tables),
        *(q.stride(0), keys.stride(0), keys.stride(1), *given.numbers),
        **given.shape,
        **given.for_forward,
        IS_SINGLE=True,
        SPLITS=rows.splits,
        **given.single,
    )
    kernels.merge_splits[num_segments, num_heads](
        *(sums, out, lse, rows.segments, given.tables[1]),
        **{name: given.shape[name] for name in ("NUM_HEADS", "WIDTH", "WIDTH_BLOCK")},
        SPLITS=rows.splits,
        HAS_SINKS=given.for_forward["HAS_SINKS"],
        num_warps=1,
    )


def backward(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: Tiled,
    spec: AttentionSpec,
    *,
    key_grads: Tensor,
    value_grads: Tensor,
) -> Tensor:
    """See `Backend.attention_gradient`."""
    given, (n, num_heads, width) = _Given(q, keys, spec), q.shape
    (dq, delta), block = _results(q, batch), given.shape["WIDTH_BLOCK"]
    kernels.row_products[n, num_heads](
        grad, out, delta, grad.stride(0), out.stride(0), WIDTH=width, WIDTH_BLOCK=block, num_warps=1
    )
    steps = (grad.stride(0), q.stride(0), keys.stride(1), *given.numbers)
    common = {**given.shape, "BLOCK_M": given.block_m, "BLOCK_N": given.backward_n, **given.launch}
    read = (grad, q, keys, values, lse, delta)
    tiles = batch.tiles("rows", given.block_m // given.groups)
    kernels.query_gradients[tiles.shape[0], given.num_key_heads](
        *read, dq, batch.segments, tiles, given.tables[0], *steps, **common
    )
    tiles = batch.tiles("keys", given.backward_n)
    kernels.key_gradients[tiles.shape[0], given.num_key_heads](
        *read, key_grads, value_grads, batch.segments, tiles, given.tables[0], *steps, **common
    )
    return dq


class _Given:
    """What kernels are told of shapes and of how scores are made."""

    def __init__(self, q: Tensor, keys: Tensor, spec: AttentionSpec) -> None:
        num_heads, width = q.shape[1:]
        self.num_key_heads = keys.shape[2] // width
        self.groups = num_heads // self.num_key_heads
        block, is_float32 = max(16, triton.next_power_of_2(width)), q.dtype == torch.float32
        slopes = q if spec.alibi_slopes is None else _slopes(spec.alibi_slopes, q.device)
        self.tables = (slopes, q if spec.sinks is None else spec.sinks)  # q: not read
        self.numbers = (spec.scale, spec.soft_cap or 1.0, spec.sliding_window or 0)
        self.shape: dict[str, Any] = {
            "NUM_HEADS": num_heads,
            "GROUPS": self.groups,
            "WIDTH": width,
            "WIDTH_BLOCK": block,
            "EXACT": is_exact(q.dtype, q.device),
            "HAS_CAP": spec.soft_cap is not None,
            "HAS_SLOPES": spec.alibi_slopes is not None,
            "HAS_WINDOW": spec.sliding_window is not None,
        }
        is_paged = keys.shape[0] > 1
        self.for_forward = {
            "IS_PAGED": is_paged,
            "TOKENS": keys.shape[1] if is_paged else 1,
            "HAS_SINKS": spec.sinks is not None,
        }
        # Sizes of tiles: by measurement on an H200 (2,048 rows of 14 heads of 64 and of 32 of 128); wide ones take much
        # of the shared memory.
        is_large = block > 128 or is_float32
        self.least_m = max(_LEAST_QUERIES, triton.next_power_of_2(self.groups))
        self.block_m, self.block_n = max(self.least_m, 32 if is_large else 64), 64 if block <= 64 else 32
        self.backward_n = 32
        self.launch = {"num_warps": 4, "num_stages": 1 if is_large else 3}
        self.single = {"BLOCK_M": self.least_m, "BLOCK_N": 32 if is_large else 64, "num_warps": 4, "num_stages": 2}


@lru_cache(maxsize=8)
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def fit(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernels are for queries [n, Hq, D] and stores that lie so."""
    n, num_heads, width = q.shape
    are_rows = n > 0 and q.stride(2) == 1 and (num_heads == 1 or q.stride(1) == width)
    are_stores = keys.stride(2) == 1 and values.stride() == keys.stride()
    return are_rows and are_stores and width <= _MOST_WIDTH and q.dtype == keys.dtype == values.dtype
