"""Attention of any number of segments as one run of batched products, forward and backward.

Query rows are cut into blocks, keys into blocks, and a *unit* is a block of queries with a block of
keys that some of them see. All units have one shape, so they are one batched product, whichever
segments they belong to. The results of a query block's units are merged as in FlashAttention-2
(arXiv 2307.08691, section 3.1), and the backward pass rebuilds the probabilities from the
log-sum-exp (section 3.2). A row's sums depend on its own keys alone.

Units run in tiles of bounded memory. Arithmetic is float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionSpec, Segment, SegmentTable
from coserve.kernels.transfer import int_tensor, on_device

# Keys of a block; rows of a block, where segments have more than one.
_BLOCK_KEYS, _BLOCK_ROWS = 64, 32
# Maximum elements of a tile's scores, all heads counted.
_MAX_TILE_ELEMENTS = 1 << 23
# The least score: below it, exponentials are zero.
_LEAST = -1e30


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """Some units (U of them): all those of some neighbouring query blocks."""

    first_block: int
    """The first query block."""
    last_block: int
    """The query block after the last."""
    blocks: Tensor
    """Query block of each unit, counted from the first, int64 [U]."""
    keys: Tensor
    """Key block of each unit, int64 [U]."""
    distance: Tensor
    """Distance of each key before the query, int64 [U, block rows, block keys]."""
    hidden: Tensor
    """Keys that a query does not see, bool [U, block rows, block keys]."""


class Part:
    """Segments that run as one, either of single rows or of several rows each. Tables are made when
    they are first read.
    """

    def __init__(self, segments: SegmentTable, block_tokens: int, device: torch.device) -> None:
        self.segments, self.block_tokens, self.device = segments, block_tokens, device
        self.is_single, self.num_rows = segments.is_single, segments.total_rows
        self._tiles: dict[tuple[int | None, int], list[Tile]] = {}

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for every place in the blocks of keys, the page, the entry in it, and both as one
        number; int64 [key blocks, block keys]. After a segment's keys its last one is repeated.
        """
        starts = list(accumulate((len(segment.pages) for segment in self.segments), initial=0))
        rows = [
            (starts[index], segment.first_key, segment.num_keys - 1, first)
            for index, segment in enumerate(self.segments)
            for first in range(0, segment.num_keys, _BLOCK_KEYS)
        ]
        start, first_key, last, first = self._tensor(rows).unbind(1)
        entries = torch.arange(_BLOCK_KEYS, device=self.device) + first[:, None]
        entries = torch.minimum(entries, last[:, None]) + first_key[:, None]
        numbers = self._tensor([page for segment in self.segments for page in segment.pages])
        pages, within = (
            numbers[start[:, None] + entries // self.block_tokens],
            entries % self.block_tokens,
        )
        return pages, within, pages * self.block_tokens + within

    @cached_property
    def rows(self) -> Tensor:
        """Return the row at each place of the query blocks (a segment's last again where there is
        none), int64 [query blocks * block rows].
        """
        size, rows, first = self._block_rows, [], 0
        for segment in self.segments:
            end = first + segment.num_rows
            rows += [
                min(row, end - 1)
                for row in range(first, first + -(-segment.num_rows // size) * size)
            ]
            first = end
        return self._tensor(rows)

    @cached_property
    def row_places(self) -> Tensor:
        """Return the place of each row in the query blocks, int64 [n]."""
        places: list[int] = []
        size, first = self._block_rows, 0
        for segment in self.segments:
            places += range(first, first + segment.num_rows)
            first += -(-segment.num_rows // size) * size
        return self._tensor(places)

    @property
    def _block_rows(self) -> int:
        return 1 if self.is_single else _BLOCK_ROWS

    def tiles(self, sliding_window: int | None, num_heads: int) -> list[Tile]:
        """Return the units in tiles, made once for all layers with the same window and number of
        heads.
        """
        key = sliding_window, num_heads
        if key not in self._tiles:
            most = max(1, _MAX_TILE_ELEMENTS // (num_heads * self._block_rows * _BLOCK_KEYS))
            self._tiles[key] = [
                self._tile(units) for units in _cut(self._units(sliding_window), most)
            ]
        return self._tiles[key]

    def _units(self, sliding_window: int | None) -> Iterator[list["_Unit"]]:
        """Yield the units of each query block."""
        size, block, first_key_block = self._block_rows, 0, 0
        window = -1 if sliding_window is None else sliding_window
        for segment in self.segments:
            before = segment.num_keys - segment.num_rows
            for first in range(0, segment.num_rows, size):
                last = min(first + size, segment.num_rows) - 1
                least = 0 if sliding_window is None else max(0, before + first - sliding_window + 1)
                units = []
                for key_block in range(least // _BLOCK_KEYS, (before + last) // _BLOCK_KEYS + 1):
                    first_key = key_block * _BLOCK_KEYS
                    offset, num_keys = before + first - first_key, segment.num_keys - first_key
                    units.append(
                        (block, first_key_block + key_block, offset, last - first, num_keys, window)
                    )
                yield units
                block += 1
            first_key_block += -(-segment.num_keys // _BLOCK_KEYS)

    def _tile(self, units: Sequence["_Unit"]) -> Tile:
        block, key_block, offset, last_row, num_keys, window = self._tensor(units).unbind(1)
        row = torch.arange(self._block_rows, device=self.device)[None, :, None]
        key = torch.arange(_BLOCK_KEYS, device=self.device)[None, None, :]
        distance = offset[:, None, None] + row - key
        hidden = (distance < 0) | (key >= num_keys[:, None, None]) | (row > last_row[:, None, None])
        if units[0][-1] >= 0:
            hidden |= distance >= window[:, None, None]
        first, last = units[0][0], units[-1][0] + 1
        return Tile(
            first_block=first,
            last_block=last,
            blocks=block - first,
            keys=key_block,
            distance=distance,
            hidden=hidden,
        )

    def _tensor(self, numbers: Sequence[object]) -> Tensor:
        return on_device(numbers, self.device, torch.int64)


# A query block, a key block, the first query's position after the block's first key, the last row
# that is there, how many keys the segment has from the block's first on, and the sliding window
# (-1: none).
_Unit = tuple[int, int, int, int, int, int]


def _cut(blocks: Iterator[list[_Unit]], most: int) -> Iterator[list[_Unit]]:
    """Yield units of whole query blocks, about `most` at a time."""
    tile: list[_Unit] = []
    for units in blocks:
        if tile and len(tile) + len(units) > most:
            yield tile
            tile = []
        tile = tile + units
    if tile:
        yield tile


class PlainAttentionBatch(AttentionBatch):
    """Segments in two parts: those of a single row (decoding), and those of several."""

    part_type: type[Part] = Part
    """Class of the parts."""

    def __init__(
        self, segments: Sequence[Segment], block_tokens: int, device: torch.device
    ) -> None:
        table = SegmentTable.of(segments)
        self._num_rows = table.total_rows
        self._parts: list[tuple[Part, Tensor | slice]] = []
        if table.is_single:
            self._parts.append(
                (self.part_type(table, block_tokens, device), slice(0, self._num_rows))
            )
            return
        lengths = table.num_rows.tolist()
        starts = list(accumulate(lengths, initial=0))
        for is_single in (True, False):
            own = [index for index, length in enumerate(lengths) if (length == 1) == is_single]
            if own:
                rows = [row for index in own for row in range(starts[index], starts[index + 1])]
                part = self.part_type(table.take(int_tensor(own)), block_tokens, device)
                self._parts.append((part, _as_slice(rows, device)))

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def run(self, each: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
        """Run `each` on every part and its rows; return the results in the order of all rows."""
        if len(self._parts) == 1:
            return each(self._parts[0][0], *rows)
        wholes: tuple[Tensor, ...] = ()
        for part, own in self._parts:
            found = each(part, *(x[own] for x in rows))
            wholes = wholes or tuple(x.new_empty(self._num_rows, *x.shape[1:]) for x in found)
            for whole, x in zip(wholes, found, strict=True):
                whole[own] = x
        return wholes


def _as_slice(rows: list[int], device: torch.device) -> Tensor | slice:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return on_device(rows, device)


def forward(
    q: Tensor, keys: Tensor, values: Tensor, part: Part, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Implement `Backend.attention`."""
    shape = _Shape(q, keys, part)
    queries = shape.by_block(q)
    outs, norms = [], []
    for tile in part.tiles(spec.sliding_window, shape.num_heads):
        k, v = shape.gather(keys, tile), shape.gather(values, tile)
        scores = _scores(
            queries[tile.first_block : tile.last_block][tile.blocks], k, tile, spec, shape
        )[0]
        out, lse = _merged(scores, v, tile, spec, shape)
        outs.append(out)
        norms.append(lse)
    out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, norms))
    return shape.by_row(out).to(q.dtype), shape.by_row(lse[..., None])[..., 0]


def backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Tensor,
    values: Tensor,
    part: Part,
    spec: AttentionSpec,
    key_grads: Tensor,
    value_grads: Tensor,
) -> Tensor:
    """Implement `Backend.attention_gradient`."""
    shape = _Shape(q, keys, part)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    queries, out_grads, deltas, norms = (
        shape.by_block(x) for x in (q, grad, delta, lse[..., None])
    )
    dq = torch.zeros_like(queries)
    for tile in part.tiles(spec.sliding_window, shape.num_heads):
        blocks = tile.blocks + tile.first_block
        k, v, own_grads = shape.gather(keys, tile), shape.gather(values, tile), out_grads[blocks]
        scores, capped = _scores(queries[blocks], k, tile, spec, shape)
        probabilities = scores.sub_(norms[blocks]).exp_()
        score_grads = torch.matmul(own_grads, v.mT).sub_(deltas[blocks]).mul_(probabilities)
        if capped is not None:
            score_grads.mul_(capped.square_().neg_().add_(1))
        score_grads.mul_(spec.scale)
        dq.index_add_(0, blocks, torch.matmul(score_grads, k))
        shape.add(key_grads, torch.matmul(score_grads.mT, queries[blocks]), tile)
        shape.add(value_grads, torch.matmul(probabilities.mT, own_grads), tile)
    return shape.by_row(dq).to(q.dtype)


class _Shape:
    """A layout of rows in blocks: [blocks, Hkv, G * rows of a block, …], with the query heads of a
    key head side by side.
    """

    def __init__(self, q: Tensor, keys: Tensor, part: Part) -> None:
        self.num_heads, self.width = q.shape[1], q.shape[2]
        self.num_key_heads = keys.shape[2] // self.width
        self.groups = self.num_heads // self.num_key_heads
        self._part, self._block_rows = part, 1 if part.is_single else _BLOCK_ROWS

    def by_block(self, x: Tensor) -> Tensor:
        """Return x [n, Hq, w] as float32 [blocks, Hkv, G * rows of a block, w]."""
        x = x.index_select(0, self._part.rows).float()
        x = x.view(-1, self._block_rows, self.num_key_heads, self.groups, x.shape[2])
        return x.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """Return x [blocks, Hkv, G * rows of a block, w] as [n, Hq, w]."""
        x = x.view(x.shape[0], self.num_heads, self._block_rows, -1).transpose(1, 2).flatten(0, 1)
        return x.index_select(0, self._part.row_places)

    def gather(self, store: Tensor, tile: Tile) -> Tensor:
        """Return a store's keys (or values) of each unit, float32 [U, Hkv, block keys, D]."""
        pages, within, _ = self._part.places
        found = store[pages[tile.keys], within[tile.keys]].float()
        # Returned in one piece, since a single unit would be multiplied another way, and rounded
        # otherwise.
        return (
            found.view(*found.shape[:2], self.num_key_heads, self.width)
            .transpose(1, 2)
            .contiguous()
        )

    def add(self, total: Tensor, grads: Tensor, tile: Tile) -> None:
        """Add gradients of each unit's keys [U, Hkv, block keys, D] to a store's."""
        places = self._part.places[2][tile.keys].flatten()
        total.view(-1, total.shape[2]).index_add_(
            0, places, grads.transpose(1, 2).flatten(2).flatten(0, 1)
        )


def _scores(
    queries: Tensor, keys: Tensor, tile: Tile, spec: AttentionSpec, shape: _Shape
) -> tuple[Tensor, Tensor | None]:
    """Return masked scores [U, Hkv, G * rows, block keys]; and the values of a soft cap without its
    factor, which its derivative needs.
    """
    scores, capped = torch.matmul(queries, keys.mT).mul_(spec.scale), None
    if spec.soft_cap is not None:
        capped = scores.div_(spec.soft_cap).tanh_()
        scores = capped * spec.soft_cap
    by_head = scores.view(scores.shape[0], shape.num_heads, *tile.hidden.shape[1:])
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, device=scores.device)
        by_head.sub_(slopes[:, None, None] * tile.distance[:, None])
    by_head.masked_fill_(tile.hidden[:, None], float("-inf"))
    return scores, capped


def _merged(
    scores: Tensor, values: Tensor, tile: Tile, spec: AttentionSpec, shape: _Shape
) -> tuple[Tensor, Tensor]:
    """Return the output [blocks, Hkv, G * rows, D] and log-sum-exp [blocks, Hkv, G * rows] from the
    scores of a tile's units.
    """
    largest = scores.amax(-1).clamp_(min=_LEAST)
    weights = scores.sub_(largest[..., None]).exp_()
    sums, outs = weights.sum(-1), torch.matmul(weights, values)
    num_blocks = tile.last_block - tile.first_block
    most = largest.new_full((num_blocks, *largest.shape[1:]), _LEAST)
    most.scatter_reduce_(0, tile.blocks[:, None, None].expand_as(largest), largest, "amax")
    if spec.sinks is not None:
        by_head = spec.sinks.float().view(shape.num_key_heads, shape.groups, 1)
        sinks = by_head.expand(-1, -1, most.shape[2] // shape.groups).flatten(1)
        most = torch.maximum(most, sinks)
    factors = (largest - most[tile.blocks]).exp_()
    total = torch.zeros_like(most).index_add_(0, tile.blocks, sums.mul_(factors))
    out = outs.new_zeros(num_blocks, *outs.shape[1:]).index_add_(
        0, tile.blocks, outs.mul_(factors[..., None])
    )
    if spec.sinks is not None:
        total += (sinks - most).exp()
    return out.div_(total[..., None]), total.log_().add_(most)
