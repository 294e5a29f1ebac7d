"""Products on AMX by kernels of our own (`products.cpp`, `int8_tiles.cpp`, `low_rank.cpp`): bfloat16, with float32 sums
that are rounded once.

Two cases, in which a library's product takes several times what reading the tensors once would take: few rows with a
large weight (skinny GEMM), and a factor of low rank, such as a LoRA's (A [rank, width], B [width, rank]) with any
number of rows.

Each function gives None, or False, when it is not for these tensors.
"""

import torch
from torch import Tensor

from coserve.kernels.cpu.compiled import Library

# Up to how many rows our product is the faster one; `benchmarks/products.py` measures it.
MOST_ROWS = 192
_MOST_RANK = 64
# Elements of the wide tensor below which a second thread takes longer to begin than it helps.
_ONE_THREAD_ELEMENTS = 1 << 13


class AmxProducts:
    """The kernels of a library that was compiled for AMX."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def skinny_gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """x W^T + b: x [n, in] of at most 192 rows, weight [out, in] -> [n, out]; in and out are multiples of 32."""
        (n, inner), outer = x.shape, weight.shape[0]
        if not _is_skinny(x, weight, bias) or not _are_for_amx(weight):
            return None
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.product(
            *(x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()),
            *(n, inner, outer, torch.get_num_threads()),
        )
        return y

    def int8_skinny_gemm(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """(x W^T) s + b: the same with int8 values [out, in] and float32 scales [out]; in is a multiple of 64."""
        (n, inner), outer = x.shape, values.shape[0]
        if not _is_skinny(x, values, bias) or not scales.is_contiguous():
            return None
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.int8_product_by_tiles(
            *(x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr()),
            *(None if bias is None else bias.data_ptr(), y.data_ptr(), n, inner, outer, torch.get_num_threads()),
        )
        return y

    def to_low_rank(self, x: Tensor, matrix: Tensor, *, transposed: bool) -> Tensor | None:
        """x M: x [n, width], M [width, rank], given as its transpose or not -> [n, rank]."""
        n, width = x.shape
        rank = matrix.shape[0] if transposed else matrix.shape[1]
        if not n or not _is_low(rank, width) or not _is_whole(matrix, (rank, width) if transposed else (width, rank)):
            return None
        if not _are_for_amx(x, matrix):
            return None
        y = torch.empty(n, rank, dtype=x.dtype)
        self._kernels.to_low_rank(
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
        if not _are_for_amx(total, x, matrix):
            return False
        self._kernels.from_low_rank(
            *(x.data_ptr(), x.stride(0), matrix.data_ptr(), transposed, total.data_ptr(), total.stride(0)),
            *(n, width, rank, _num_threads(n * width)),
        )
        return True

    def add_low_rank_gradient(self, total: Tensor, narrow: Tensor, wide: Tensor, *, transposed: bool) -> bool:
        """total += narrow^T wide, or its transpose: narrow [n, rank], wide [n, width], total float32 [rank, width] or
        [width, rank]; whether it did.
        """
        (n, rank), width = narrow.shape, wide.shape[1]
        if wide.shape[0] != n or not _is_low(rank, width) or not _are_for_amx(narrow, wide):
            return False
        if total.dtype != torch.float32 or not _is_whole(total, (width, rank) if transposed else (rank, width)):
            return False
        self._kernels.add_low_rank_gradient(
            *(narrow.data_ptr(), narrow.stride(0), wide.data_ptr(), wide.stride(0), total.data_ptr(), transposed),
            *(n, width, rank, _num_threads(n * width)),
        )
        return True


def _is_skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are few rows, and a weight [out, in] and a bias of a shape that is cut into whole tiles."""
    n, inner = x.shape
    return 0 < n <= MOST_ROWS and weight.shape[1] == inner and fit_weight(weight, bias) and _are_for_amx(x)


def fit_weight(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a weight [out, in] and a bias are of a shape that is cut into whole tiles, and lie so."""
    outer, inner = weight.shape
    if inner * weight.itemsize % 64 or outer % 32 or not weight.is_contiguous():
        return False
    return bias is None or (bias.shape == (outer,) and bias.is_contiguous() and _are_for_amx(bias))


def _is_low(rank: int, width: int) -> bool:
    return 0 < rank <= _MOST_RANK < width and width % 32 == 0


def _is_whole(matrix: Tensor, shape: tuple[int, int]) -> bool:
    return matrix.shape == shape and matrix.is_contiguous()


def _are_for_amx(*tensors: Tensor) -> bool:
    """Whether all of these are bfloat16 on the CPU, and the elements of a row neighbours."""
    for tensor in tensors:  # a decode step asks a hundred times: a generator takes as long again
        if tensor.dtype != torch.bfloat16 or not tensor.is_cpu or tensor.stride(-1) != 1:
            return False
    return True


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements <= _ONE_THREAD_ELEMENTS else torch.get_num_threads()
