"""Products of rows with the factors of many adapters at once (grouped GEMM).

Each adapter's rows are cut into blocks of a fixed size, the last one filled up; a block and its adapter's factor are
one member of a batched product. So the number of operations does not depend on how many adapters there are, and a row's
sums do not depend on its company.
"""

from functools import lru_cache

import torch
from torch import Tensor

from coserve.kernels.base import AdapterRows, Grouped
from coserve.kernels.transfer import on_device

_BLOCK_ROWS = 8


def grouped_product(x: Tensor, factor: Grouped) -> Tensor:
    """x F^T with each row's own F; x [n, in], n distinct F [out, in] -> [n, out]."""
    tables = _tables(factor.rows)
    factors = torch.stack(factor.tensors).index_select(0, tables.adapters)
    y = torch.bmm(x.index_select(0, tables.rows).view(-1, _BLOCK_ROWS, x.shape[1]), factors.mT)
    return y.flatten(0, 1).index_select(0, tables.places)


class _Tables:
    """Which adapter each block has (int64 [blocks]), which row each place of the blocks (a last row again where there
    is none; int64 [blocks * size]), and which place each row (int64 [n]).
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
        self.adapters, self.rows, self.places = (
            on_device(numbers, rows.device) for numbers in (adapters, sources, places)
        )


@lru_cache(maxsize=16)
def _tables(rows: AdapterRows) -> _Tables:
    """Made once for all products of a step."""
    return _Tables(rows)
