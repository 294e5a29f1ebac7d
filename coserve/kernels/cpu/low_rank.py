"""Products with a factor of low rank, such as a LoRA's (A [rank, width], B [width, rank]), and its gradient, by kernels
of our own: bfloat16, with float32 sums that are rounded once. In tiles where there are some (`low_rank.cpp`), in
float32 elsewhere (`vector_low_rank.cpp`). A library's product takes several times what reading the wide tensor takes.

Each function gives None, or False, when it is not for these tensors.
"""

import torch
from torch import Tensor

from coserve.kernels.cpu.compiled import Library
from coserve.kernels.cpu.tile_products import are_bfloat16

_MOST_RANK = 64
# Elements of the wide tensor below which a second thread takes longer to begin than it helps.
_ONE_THREAD_ELEMENTS = 1 << 13


class LowRankProducts:
    """The kernels of a library for this processor."""

    def __init__(self, kernels: Library) -> None:
        has_tiles = kernels.has_tiles
        self._to_low_rank = kernels.to_low_rank if has_tiles else kernels.vector_to_low_rank
        self._from_low_rank = kernels.from_low_rank if has_tiles else kernels.vector_from_low_rank
        self._gradient = kernels.add_low_rank_gradient if has_tiles else kernels.vector_low_rank_gradient

    def to_low_rank(self, x: Tensor, matrix: Tensor, *, transposed: bool) -> Tensor | None:
        """x M: x [n, width], M [width, rank], given as its transpose or not -> [n, rank]."""
        n, width = x.shape
        rank = matrix.shape[0] if transposed else matrix.shape[1]
        if not n or not _is_low(rank, width) or not _is_whole(matrix, (rank, width) if transposed else (width, rank)):
            return None
        if not are_bfloat16(x, matrix):
            return None
        y = torch.empty(n, rank, dtype=x.dtype)
        self._to_low_rank(
            *(x.data_ptr(), x.stride(0), matrix.data_ptr(), transposed, y.data_ptr()),
            *(n, width, rank, _num_threads(n * width)),
        )
        return y

    def add_from_low_rank(self, total: Tensor, x: Tensor, matrix: Tensor, *, transposed: bool) -> bool:
        """total += x M: total [n, width], x [n, rank], M [rank, width], given as its transpose or not; whether it
        did.
        """
        n, width = total.shape
        rank = x.shape[1]
        shape = (width, rank) if transposed else (rank, width)
        if x.shape[0] != n or not _is_low(rank, width) or not _is_whole(matrix, shape):
            return False
        if not are_bfloat16(total, x, matrix):
            return False
        self._from_low_rank(
            *(x.data_ptr(), x.stride(0), matrix.data_ptr(), transposed, total.data_ptr(), total.stride(0)),
            *(n, width, rank, _num_threads(n * width)),
        )
        return True

    def add_low_rank_gradient(self, total: Tensor, narrow: Tensor, wide: Tensor, *, transposed: bool) -> bool:
        """total += narrow^T wide, or its transpose: narrow [n, rank], wide [n, width], total float32 [rank, width] or
        [width, rank]; whether it did.
        """
        (n, rank), width = narrow.shape, wide.shape[1]
        if wide.shape[0] != n or not _is_low(rank, width) or not are_bfloat16(narrow, wide):
            return False
        if total.dtype != torch.float32 or not _is_whole(total, (width, rank) if transposed else (rank, width)):
            return False
        self._gradient(
            *(narrow.data_ptr(), narrow.stride(0), wide.data_ptr(), wide.stride(0), total.data_ptr(), transposed),
            *(n, width, rank, _num_threads(n * width)),
        )
        return True


def _is_low(rank: int, width: int) -> bool:
    return 0 < rank <= _MOST_RANK < width and width % 32 == 0


def _is_whole(matrix: Tensor, shape: tuple[int, int]) -> bool:
    return matrix.shape == shape and matrix.is_contiguous()


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements <= _ONE_THREAD_ELEMENTS else torch.get_num_threads()
