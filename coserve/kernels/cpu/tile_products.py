"""Products of rows with a large weight in tiles, by kernels of our own: of few rows (skinny GEMM:
`products.cpp`, `int8_tiles.cpp`) and, with AMX, of many (`wide_tiles.cpp`, `wide_gradients.cpp`).
bfloat16, with float32 sums that are rounded once.

Each function gives None when it is not for these tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, c_int64

import torch
from torch import Tensor

from coserve.kernels.cpu.compiled import Library
from coserve.kernels.low_rank import LowRankGradient, LowRankRows

# Maximum rows for which our product is the faster one where there is none for many;
# `experiments/products.py` measures it.
MAX_ROWS = 192
# Maximum threads with which the product of many rows was measured, as in `products.cpp`: each
# arranges rows for itself.
_MAX_WIDE_THREADS = 4
# Minimum rows for which it is the faster one, as there; and maximum rank of a LoRA that it adds.
_MIN_WIDE_ROWS, _MAX_RANK = 128, 64
# Minimum rows for which input gradients are faster in tiles.
_MIN_GRADIENT_ROWS = 128


class TileProducts:
    """The kernels of a library that has tiles."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    @property
    def fused(self) -> Mapping[str, Callable[..., Tensor | None]]:
        """Return the kernels of fused operators, which need AMX (`Backend.fused`)."""
        return {
            "linear_and_low_rank": self.product_and_low_rank,
            "gated_linear": self.gated_product,
            "linear_beside_low_rank": self.gradient_beside_low_rank,
        }

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Return x W^T + b: x [n, in], weight [out, in] -> [n, out]; in and out are multiples of
        32.
        """
        (n, inner), outer = x.shape, weight.shape[0]
        if not self._fit(x, weight, bias) or not are_bfloat16(weight):
            return None
        # Without a product for many rows, PyTorch's is the faster one beyond this.
        if n > MAX_ROWS and not has_wide_products(self._kernels):
            return None
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.product(
            *(
                x.data_ptr(),
                x.stride(0),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                y.data_ptr(),
            ),
            *(n, inner, outer, torch.get_num_threads()),
        )
        return y

    def product_and_low_rank(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Sequence[LowRankRows]
    ) -> Tensor | None:
        """Return the product of many rows, to some of whose columns a LoRA is added within the same
        sums, by AMX.
        """
        if (table := self._wide_table(x, weight, bias, added)) is None:
            return None
        (n, inner), outer = x.shape, weight.shape[0]
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.wide_product_and_low_rank(
            *(
                x.data_ptr(),
                x.stride(0),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                y.data_ptr(),
            ),
            *(table, len(added), n, inner, outer, torch.get_num_threads()),
        )
        return y

    def gated_product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        added: Sequence[LowRankRows],
        keep: Sequence[Tensor],
    ) -> Tensor | None:
        """Return the `gated_linear` of many rows whose factors are both kept, by AMX."""
        if (
            len(keep) != 2
            or weight.shape[0] % 64
            or (table := self._wide_table(x, weight, bias, added)) is None
        ):
            return None
        (n, inner), outer = x.shape, weight.shape[0]
        gate, up = keep
        assert gate.shape == up.shape == (n, outer // 2)
        # The kernel takes one step between rows for both.
        if not are_bfloat16(gate, up) or gate.stride(0) != up.stride(0):
            return None
        y = torch.empty(n, outer // 2, dtype=x.dtype)
        self._kernels.wide_gated_product(
            *(
                x.data_ptr(),
                x.stride(0),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
            ),
            *(gate.data_ptr(), up.data_ptr(), gate.stride(0), y.data_ptr()),
            *(table, len(added), n, inner, outer, torch.get_num_threads()),
        )
        return y

    def _wide_table(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Sequence[LowRankRows]
    ) -> "Array[c_int64] | None":
        """Return the low-rank products that are added, as a table for kernels of many rows; None if
        these kernels are not for the tensors.
        """
        n, outer = x.shape[0], weight.shape[0]
        if n < _MIN_WIDE_ROWS or not has_wide_products(self._kernels):
            return None
        if (
            not self._fit(x, weight, bias)
            or not are_bfloat16(weight)
            or not all(_fit_added(n, each) for each in added)
        ):
            return None
        # Six numbers for each low-rank product, as `wide_tiles.cpp` reads them.
        table = list[int]()
        for narrow, b, first in added:
            end = first + b.shape[0]
            assert first >= 0 and end <= outer
            table += (narrow.data_ptr(), narrow.stride(0), b.data_ptr(), b.shape[1], first, end)
        return (c_int64 * len(table))(*table)

    def input_gradient(
        self,
        grad: Tensor,
        weight: Tensor,
        onto: Tensor | None = None,
        added: LowRankGradient | None = None,
    ) -> Tensor | None:
        """Return dy W of many rows plus `added`, by AMX; in and out are multiples of 32.

        Args:
            onto: rows that the result is added to in place, rounded once.
            added: gradient of a low-rank product of the same rows.
        """
        (n, outer), inner = grad.shape, weight.shape[1]
        if n < _MIN_GRADIENT_ROWS or not outer or not has_wide_products(self._kernels):
            return None
        if (
            weight.shape[0] != outer
            or not are_bfloat16(grad, weight)
            or not fit_weight(weight, None)
        ):
            return None
        if onto is not None and (onto.shape != (n, inner) or not are_bfloat16(onto)):
            return None
        if added is not None and not _fit_added_gradient(n, inner, added):
            return None
        # `onto` is read and written by the kernel, so its rows may have a step of their own.
        x_grad = torch.empty(n, inner, dtype=grad.dtype) if onto is None else onto
        # A null address: nothing is added.
        low_rank = (0, 0, 0, 0)
        if added is not None:
            narrow, a = added
            low_rank = (narrow.data_ptr(), narrow.stride(0), a.data_ptr(), a.shape[0])
        self._kernels.tile_input_gradient(
            *(
                grad.data_ptr(),
                grad.stride(0),
                weight.data_ptr(),
                x_grad.data_ptr(),
                x_grad.stride(0),
            ),
            *(onto is not None, *low_rank, n, inner, outer, torch.get_num_threads()),
        )
        return x_grad

    def gradient_beside_low_rank(
        self, grad: Tensor, weight: Tensor, added: LowRankGradient, onto: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of `linear_beside_low_rank` of many rows, by AMX."""
        return self.input_gradient(grad, weight, onto, added)

    def int8_skinny_gemm(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor | None:
        """Return (x W^T) s + b by AMX, with int8 values [out, in], in a multiple of 64, and float32
        scales [out].
        """
        (n, inner), outer = x.shape, values.shape[0]
        if (
            not self._kernels.has_amx
            or n > MAX_ROWS
            or not self._fit(x, values, bias)
            or not scales.is_contiguous()
        ):
            return None
        y = torch.empty(n, outer, dtype=x.dtype)
        self._kernels.int8_product_by_tiles(
            *(x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr()),
            *(
                None if bias is None else bias.data_ptr(),
                y.data_ptr(),
                n,
                inner,
                outer,
                torch.get_num_threads(),
            ),
        )
        return y

    def _fit(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether these are rows, a weight [out, in] and a bias of a shape that is cut into
        whole tiles.
        """
        n, inner = x.shape
        return n > 0 and weight.shape[1] == inner and fit_weight(weight, bias) and are_bfloat16(x)


def has_wide_products(kernels: Library) -> bool:
    """Return whether our products are for any number of rows, with as many threads as now."""
    return kernels.has_amx and torch.get_num_threads() <= _MAX_WIDE_THREADS


def _fit_added(n: int, added: LowRankRows) -> bool:
    """Return whether columns come in whole tiles, and the rank is one for which PyTorch's products
    are not faster.
    """
    (columns, rank), narrow = added.b.shape, added.narrow
    # A tile has 32 columns, and none may be of two low-rank products.
    if columns % 32 or added.first % 32 or not 0 < rank <= _MAX_RANK or narrow.shape != (n, rank):
        return False
    return added.b.is_contiguous() and are_bfloat16(added.b, narrow)


def _fit_added_gradient(n: int, inner: int, added: LowRankGradient) -> bool:
    narrow, a = added
    rank = a.shape[0]
    if not 0 < rank <= _MAX_RANK or narrow.shape != (n, rank) or a.shape[1] != inner:
        return False
    return a.is_contiguous() and are_bfloat16(a, narrow)


def fit_weight(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a weight [out, in] and a bias are of a shape that is cut into whole tiles, and
    are contiguous.
    """
    outer, inner = weight.shape
    # A row of an AMX tile has 64 bytes: 32 numbers of bfloat16, or 64 of int8.
    if inner * weight.itemsize % 64 or outer % 32 or not weight.is_contiguous():
        return False
    return bias is None or (bias.shape == (outer,) and bias.is_contiguous() and are_bfloat16(bias))


def are_bfloat16(*tensors: Tensor) -> bool:
    """Return whether all of these are bfloat16 on the CPU, with contiguous rows."""
    for tensor in tensors:  # a decode step asks a hundred times: a generator takes as long again
        if tensor.dtype != torch.bfloat16 or not tensor.is_cpu or tensor.stride(-1) != 1:
            return False
    return True
