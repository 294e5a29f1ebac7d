"""Adapters of rows by the kernel of `adapters.cpp`: float32 or bfloat16, no gaps within a row."""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from coserve.kernels.cpu import rows
from coserve.kernels.cpu.compiled import Library
from coserve.kernels.low_rank import PLACE_NUMBERS, AdapterBatch

# Minimum rows of an adapter for which its factors are multiplied faster in tiles than by vectors:
# by the matrix units, and by instructions for pairs.
MANY_ROWS, _MANY_ROWS_BY_PAIRS = 16, 128


def many_rows(kernels: Library) -> int:
    """Return the minimum number of an adapter's rows that are multiplied in tiles."""
    return MANY_ROWS if kernels.has_amx else _MANY_ROWS_BY_PAIRS


def fit(x: Tensor, outputs: Sequence[Tensor], batch: AdapterBatch) -> bool:
    """Return whether the kernel can work on these."""
    return batch.dtype == x.dtype and rows.fit(x, *outputs)


def add_adapters(
    kernels: Library, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
) -> None:
    """Implement `Backend.add_adapters`."""
    sites = [number for y in outputs for number in (y.data_ptr(), y.stride(0), y.shape[1])]
    num_adapters, num_places, _ = batch.addresses.shape
    assert first_place + len(outputs) <= num_places
    kernels.add_adapters(
        *(
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            batch.rows.data_ptr(),
            batch.ends.data_ptr(),
            num_adapters,
        ),
        *(
            batch.addresses.data_ptr() + 8 * PLACE_NUMBERS * first_place,
            num_places,
            (c_int64 * len(sites))(*sites),
        ),
        *(len(outputs), many_rows(kernels), x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
