"""Adapters of the rows of a step: their tables on the device, and the launches."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from coserve.kernels.low_rank import PLACE_NUMBERS, AdapterBatch
from coserve.kernels.transfer import on_device
from coserve.kernels.triton import adapter_kernels as kernels
from coserve.kernels.triton.products import is_exact

# Rows of a block: the least that matrix units take.
BLOCK_ROWS = 16
BLOCK_NUMBERS = 1 + BLOCK_ROWS
# The largest rank that the kernels are for: factors of a tile stay in registers.
MOST_RANK = 128
_INNER, _OUTER = 128, 128
# An inner width above this is divided among programs, which would be too few otherwise.
_INNER_OF_A_SPLIT = 1024
_MOST_SPLITS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTables:
    """blocks int64 [blocks, 17] and table int64 [adapters, places, 9] (see `adapter_kernels`);
    rank: room for the largest.
    """

    blocks: Tensor
    table: Tensor
    rank: int


def room_for_rank(batch: AdapterBatch) -> int:
    """A power of two."""
    return max(
        BLOCK_ROWS, 1 << (max(adapter.max_rank for adapter in batch.adapters) - 1).bit_length()
    )


def host_blocks(batch: AdapterBatch) -> Tensor:
    """Rows of each adapter in blocks, int64 [blocks, 17], on the CPU."""
    rows, numbers = batch.rows_by_adapter, array("q")
    for adapter, own in enumerate(rows):
        for first in range(0, len(own), BLOCK_ROWS):
            some = own[first : first + BLOCK_ROWS]
            numbers.append(adapter)
            numbers.extend(some)
            numbers.extend([-1] * (BLOCK_ROWS - len(some)))
    return torch.frombuffer(numbers, dtype=torch.int64).view(-1, BLOCK_NUMBERS)


class StaticAdapters(AdapterBatch):
    """Stands for the adapters of any step: the tables have theirs when they are read."""

    def __init__(self, tables: RowTables, mask: int) -> None:
        self.tables, self._mask = tables, mask

    @property
    def mask(self) -> int:
        return self._mask


def fit(batch: AdapterBatch, dtype: torch.dtype) -> bool:
    """Whether the kernels are for these adapters."""
    if isinstance(batch, StaticAdapters):
        return True
    return batch.dtype == dtype and room_for_rank(batch) <= MOST_RANK


def add_adapters(
    x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
) -> None:
    """See `Backend.add_adapters`."""
    tables = batch.tables if isinstance(batch, StaticAdapters) else _tables(batch)
    num_blocks, inner = tables.blocks.shape[0], x.shape[1]
    num_places = len(outputs)
    splits = min(_MOST_SPLITS, triton.cdiv(inner, _INNER_OF_A_SPLIT))
    sums = torch.empty(
        num_blocks,
        num_places,
        splits,
        BLOCK_ROWS,
        tables.rank,
        dtype=torch.float32,
        device=x.device,
    )
    table = tables.table[:, first_place:]
    common = {
        "NUMBERS": PLACE_NUMBERS,
        "ROWS": BLOCK_ROWS,
        "RANK": tables.rank,
        "SPLITS": splits,
        "EXACT": is_exact(x.dtype, x.device),
    }
    kernels.narrow[num_blocks, num_places, splits](
        x, sums, tables.blocks, table, x.stride(0), inner, table.stride(0), BLOCK=_INNER, **common
    )
    for place, y in enumerate(outputs):
        outer = y.shape[1]
        kernels.widen[num_blocks, triton.cdiv(outer, _OUTER)](
            *(
                sums,
                y,
                tables.blocks,
                table,
                y.stride(0),
                outer,
                table.stride(0),
                place,
                num_places,
            ),
            BLOCK=_OUTER,
            **common,
        )


def table_of(batch: AdapterBatch) -> Tensor:
    """Where the factors of its adapters lie: int64 [adapters, places, 9]."""
    return torch.stack([adapter.device_addresses for adapter in batch.adapters])


def _tables(batch: AdapterBatch) -> RowTables:
    """Made once for all places of a step."""
    if (found := batch.derived.get(RowTables)) is None:
        found = batch.derived[RowTables] = RowTables(
            blocks=on_device(host_blocks(batch), batch.sizes.device),
            table=table_of(batch),
            rank=room_for_rank(batch),
        )
    tables: RowTables = found
    return tables
