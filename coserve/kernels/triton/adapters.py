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
MAX_RANK = 128
_INNER, _OUTER = 128, 128
# An inner width above this is divided among programs, which would be too few otherwise.
_INNER_OF_A_SPLIT = 1024
_MAX_SPLITS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTables:
    """Tables of a step's adapters on the device."""

    blocks: Tensor
    """Blocks of rows, int64 [blocks, 17]; see `adapter_kernels`."""
    table: Tensor
    """Factors, int64 [adapters, places, 9]."""
    rank: int
    """Room for the largest rank."""


def room_for_rank(batch: AdapterBatch) -> int:
    """Return the room for the largest rank of a batch, a power of two."""
    return max(
        BLOCK_ROWS, 1 << (max(adapter.max_rank for adapter in batch.adapters) - 1).bit_length()
    )


def host_blocks(batch: AdapterBatch) -> Tensor:
    """Return the rows of each adapter in blocks, int64 [blocks, 17], on the CPU."""
    rows, numbers = batch.rows_by_adapter, array("q")
    for adapter, own in enumerate(rows):
        for first in range(0, len(own), BLOCK_ROWS):
            some = own[first : first + BLOCK_ROWS]
            numbers.append(adapter)
            numbers.extend(some)
            numbers.extend([-1] * (BLOCK_ROWS - len(some)))
    return torch.frombuffer(numbers, dtype=torch.int64).view(-1, BLOCK_NUMBERS)


class StaticAdapters(AdapterBatch):
    """A stand-in for the adapters of any step, whose tables hold theirs when they are read."""

    def __init__(self, tables: RowTables, mask: int) -> None:
        self.tables, self._mask = tables, mask

    @property
    def mask(self) -> int:
        return self._mask


def fit(batch: AdapterBatch, dtype: torch.dtype) -> bool:
    """Return whether the kernels are for these adapters."""
    # What fits was asked of the step's own adapters (`GraphCalls.fit`).
    if isinstance(batch, StaticAdapters):
        return True
    return batch.dtype == dtype and room_for_rank(batch) <= MAX_RANK


def add_adapters(
    x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
) -> None:
    """Implement `Backend.add_adapters`."""
    tables = batch.tables if isinstance(batch, StaticAdapters) else _tables(batch)
    num_blocks, inner = tables.blocks.shape[0], x.shape[1]
    num_places = len(outputs)
    splits = min(_MAX_SPLITS, triton.cdiv(inner, _INNER_OF_A_SPLIT))
    sums = torch.empty(
        num_blocks,
        num_places,
        splits,
        BLOCK_ROWS,
        tables.rank,
        dtype=torch.float32,
        device=x.device,
    )
    # A view: kernels count places from the first one of this call.
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
    # One launch each, since outputs may differ in width.
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
    """Return the table of the adapters' factors: int64 [adapters, places, 9]."""
    return torch.stack([adapter.device_addresses for adapter in batch.adapters])


def _tables(batch: AdapterBatch) -> RowTables:
    """Return the tables of a batch, made once for all places of a step."""
    if (found := batch.derived.get(RowTables)) is None:
        found = batch.derived[RowTables] = RowTables(
            blocks=on_device(host_blocks(batch), batch.sizes.device),
            table=table_of(batch),
            rank=room_for_rank(batch),
        )
    tables: RowTables = found
    return tables
