"""Products of few rows with a large weight (skinny GEMM) in tiles, by kernels of our own (`products.cpp`,
`int8_tiles.cpp`): bfloat16, with float32 sums that are rounded once.

Each function gives None when it is not for these tensors.
"""

import torch
from torch import Tensor

from coserve.kernels.cpu.compiled import Library

# Up to how many rows our product is the faster one; `benchmarks/products.py` measures it.
MOST_ROWS = 192


class TileProducts:
    """The kernels of a library that has tiles."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def skinny_gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """x W^T + b: x [n, in] of at most 192 rows, weight [out, in] -> [n, out]; in and out are multiples of 32."""
        (n, inner), outer = x.shape, weight.shape[0]
        if not _is_skinny(x, weight, bias) or not are_bfloat16(weight):
            return None
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.product(
            *(x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()),
            *(n, inner, outer, torch.get_num_threads()),
        )
        return y

    def int8_skinny_gemm(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """(x W^T) s + b by AMX: the same with int8 values [out, in], in a multiple of 64, and float32 scales [out]."""
        (n, inner), outer = x.shape, values.shape[0]
        if not self._kernels.has_amx or not _is_skinny(x, values, bias) or not scales.is_contiguous():
            return None
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.int8_product_by_tiles(
            *(x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr()),
            *(None if bias is None else bias.data_ptr(), y.data_ptr(), n, inner, outer, torch.get_num_threads()),
        )
        return y


def _is_skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are few rows, and a weight [out, in] and a bias of a shape that is cut into whole tiles."""
    n, inner = x.shape
    return 0 < n <= MOST_ROWS and weight.shape[1] == inner and fit_weight(weight, bias) and are_bfloat16(x)


def fit_weight(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a weight [out, in] and a bias are of a shape that is cut into whole tiles, and lie so."""
    outer, inner = weight.shape
    if inner * weight.itemsize % 64 or outer % 32 or not weight.is_contiguous():
        return False
    return bias is None or (bias.shape == (outer,) and bias.is_contiguous() and are_bfloat16(bias))


def are_bfloat16(*tensors: Tensor) -> bool:
    """Whether all of these are bfloat16 on the CPU, and the elements of a row neighbours."""
    for tensor in tensors:  # a decode step asks a hundred times: a generator takes as long again
        if tensor.dtype != torch.bfloat16 or not tensor.is_cpu or tensor.stride(-1) != 1:
            return False
    return True
