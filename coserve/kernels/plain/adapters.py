"""Products of rows with the factors of many adapters at once (grouped GEMM).

Each adapter's rows are cut into blocks of a fixed size, the last one filled up; a block and its
adapter's factor are one member of a batched product. So the number of operations does not depend on
how many adapters there are, and a row's sums do not depend on its company.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from coserve.kernels.base import Backend, Grouped, JoinedRows
from coserve.kernels.low_rank import AdapterBatch, AdapterRows, LowRankFactors
from coserve.kernels.transfer import on_device

_BLOCK_ROWS = 8


def grouped_product(x: Tensor, factor: Grouped, *, transposed: bool) -> Tensor:
    """Return x F^T (transposed) or x F with each row's own F [out, in]."""
    tables = _tables(factor.rows)
    factors = torch.stack(factor.tensors).index_select(0, tables.adapters)
    blocks = x.index_select(0, tables.rows).view(-1, _BLOCK_ROWS, x.shape[1])
    y = torch.bmm(blocks, factors.mT if transposed else factors)
    return y.flatten(0, 1).index_select(0, tables.places)


def add_grouped_gradient(grad: Tensor, x: Tensor | JoinedRows, onto: Grouped) -> None:
    """Add dy^T x of each adapter's rows to its sum; fewer rows than the most are filled up with
    zeros.
    """
    rows, places = onto.rows, _tables(onto.rows).padded
    if isinstance(x, JoinedRows):
        x = torch.cat(x.tensors)

    def padded(rows_of_all: Tensor) -> Tensor:
        most = max(rows.sizes)
        filled = rows_of_all.new_zeros(len(rows.sizes) * most, rows_of_all.shape[1])
        return filled.index_copy_(0, places, rows_of_all).view(len(rows.sizes), most, -1)

    found = torch.bmm(padded(grad).mT, padded(x)).float()
    torch._foreach_add_(list(onto.tensors), list(found.unbind()))


def add_at_once(
    x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
) -> None:
    """Implement `Backend.add_adapters`, with smaller ranks filled up with zeros."""
    blocks: dict[AdapterBatch, Tensor] = {}
    for place, y in enumerate(outputs, first_place):
        if not batch.mask >> place & 1:
            continue
        own = batch.at(place)
        tables = _tables(own.sizes)
        if own not in blocks:
            rows = own.rows.index_select(0, tables.rows)
            blocks[own] = x.index_select(0, rows).view(-1, _BLOCK_ROWS, x.shape[1])
        factors = [
            factors for adapter in own.adapters if (factors := adapter.places[place]) is not None
        ]
        y.index_add_(
            0, own.rows, _sums(blocks[own], factors, own.sizes).index_select(0, tables.places)
        )


def _sums(blocks: Tensor, factors: Sequence[LowRankFactors], rows: AdapterRows) -> Tensor:
    """Return scale * B (A x) of blocks [blocks, size, in] with their adapters' factors -> [blocks *
    size, out].
    """
    columns, scales = _columns(
        rows, tuple(each.a.shape[0] for each in factors), tuple(each.scale for each in factors)
    )
    # The last row of all A's and the last column of all B's are zeros.
    a = torch.cat([*(each.a for each in factors), blocks.new_zeros(1, blocks.shape[2])])
    b = torch.cat([*(each.b for each in factors), blocks.new_zeros(factors[0].b.shape[0], 1)], 1)
    a = a.index_select(0, columns.flatten()).view(*columns.shape, -1)  # [blocks, rank, in]
    b = b.index_select(1, columns.flatten()).view(-1, *columns.shape)  # [out, blocks, rank]
    narrow = torch.bmm(blocks, a.mT) * scales.to(blocks.dtype)[:, None, None]
    return torch.bmm(narrow, b.permute(1, 2, 0)).flatten(0, 1)


@lru_cache(maxsize=64)
def _columns(
    rows: AdapterRows, ranks: tuple[int, ...], scales: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Return each block's columns among those of all adapters, and its scale [blocks].

    Columns are int64 [blocks, the largest rank], with the one after the last where an adapter has
    no more. Made once per step for all places of the same ranks.
    """
    most, start, found = max(ranks), 0, []
    for rank in ranks:
        found.append([*range(start, start + rank), *[sum(ranks)] * (most - rank)])
        start += rank
    adapters = _tables(rows).adapters
    return on_device(found, rows.device)[adapters], on_device(scales, rows.device, torch.float32)[
        adapters
    ]


def add_one_by_one(
    backend: Backend, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
) -> None:
    """Implement `Backend.add_adapters` adapter by adapter, by the backend's products."""
    for adapter, own in zip(batch.adapters, batch.sizes.slices, strict=True):
        rows = batch.rows[own]
        for factors, y in zip(
            adapter.places[first_place : first_place + len(outputs)], outputs, strict=True
        ):
            if factors is None:
                continue
            narrow = backend.low_rank_product(x[rows], factors.a) * factors.scale
            y.index_copy_(0, rows, backend.low_rank_product(narrow, factors.b, y[rows]))


class _Tables:
    """Tables of blocks of rows.

    - adapters: the adapter of each block, int64 [blocks].
    - sources: the row at each place of the blocks (a last row again where there is none), int64
      [blocks * size].
    - places: the place of each row, int64 [n].
    - padded: the place of each row where all adapters take as many rows as the one with the most,
      int64 [n].
    """

    def __init__(self, rows: AdapterRows) -> None:
        adapters: list[int] = []
        sources: list[int] = []
        places: list[int] = []
        for adapter, own in enumerate(rows.slices):
            num_blocks = -(-(own.stop - own.start) // _BLOCK_ROWS)
            places.extend(range(len(sources), len(sources) + own.stop - own.start))
            adapters.extend([adapter] * num_blocks)
            filled = range(own.start, own.start + num_blocks * _BLOCK_ROWS)
            sources.extend(min(row, own.stop - 1) for row in filled)
        most = max(rows.sizes)
        padded = [
            adapter * most + row for adapter, size in enumerate(rows.sizes) for row in range(size)
        ]
        self.adapters, self.rows, self.places, self.padded = (
            on_device(numbers, rows.device) for numbers in (adapters, sources, places, padded)
        )


@lru_cache(maxsize=16)
def _tables(rows: AdapterRows) -> _Tables:
    """Return the tables of some rows, made once for all products of a step."""
    return _Tables(rows)
