"""Launches of `row_kernels`."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from coserve.kernels.base import SiluMulGradients
from coserve.kernels.row_copies import RowCopies
from coserve.kernels.transfer import on_device
from coserve.kernels.triton import row_kernels as kernels

# Elements of a row that a program takes, and words of copies.
_BLOCK, _COPIED_WORDS = 1024, 2048


def fit(*tensors: Tensor) -> bool:
    """Return whether the kernels are for rows [n, width] of these: at least one, of one dtype,
    without gaps in a row.
    """
    first = tensors[0]
    return first.shape[0] > 0 and all(x.stride(-1) == 1 and x.dtype == first.dtype for x in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `Backend.rms_norm`."""
    (n, width), features = x.shape, weight.shape[0]
    y, block = _like(x), triton.next_power_of_2(features)
    kernels.rms_norm[n, width // features](
        x, weight, y, x.stride(0), eps, FEATURES=features, BLOCK=block, num_warps=_warps(block)
    )
    return y


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Implement `Backend.rms_norm_gradient`."""
    (n, width), features = x.shape, weight.shape[0]
    dx, block = _like(x), triton.next_power_of_2(features)
    y = _like(x) if with_y else None
    kernels.rms_norm_gradient[n, width // features](
        # dx stands in for y where that is not written.
        *(grad, x, weight, dx, dx if y is None else y, grad.stride(0), x.stride(0), eps),
        FEATURES=features,
        BLOCK=block,
        WITH_Y=with_y,
        num_warps=_warps(block),
    )
    return dx, y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Implement `Backend.silu_mul`."""
    n, width = gate.shape
    y = _like(gate)
    kernels.silu_mul[n, triton.cdiv(width, _BLOCK)](
        gate, up, y, gate.stride(0), up.stride(0), width, BLOCK=_BLOCK
    )
    return y


def silu_mul_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
) -> SiluMulGradients:
    """Implement `Backend.silu_mul_gradients`."""
    n, width = gate.shape
    found = SiluMulGradients(_like(gate), _like(up), _like(gate) if with_y else None)
    y = found.gate if found.y is None else found.y
    kernels.silu_mul_gradients[n, triton.cdiv(width, _BLOCK)](
        *(
            grad,
            gate,
            up,
            found.gate,
            found.up,
            y,
            grad.stride(0),
            gate.stride(0),
            up.stride(0),
            width,
        ),
        BLOCK=_BLOCK,
        WITH_Y=with_y,
    )
    return found


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, reverse: bool = False) -> Tensor:
    """Implement `Backend.rope`, or `Backend.rope_gradient` in reverse."""
    (n, width), half = x.shape, cos.shape[1] // 2
    heads, block_half, y = width // (2 * half), triton.next_power_of_2(half), _like(x)
    block_heads = min(triton.next_power_of_2(heads), max(1, _BLOCK // block_half))
    kernels.rope[n, triton.cdiv(heads, block_heads)](
        *(x, cos, sin, y, x.stride(0), cos.stride(0)),
        HEADS=heads,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        REVERSE=reverse,
        enable_fp_fusion=False,  # which would leave out the rounding of a product before a sum
    )
    return y


def store_rows(x: Tensor, store: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Copy rows [n, width] to a store [num_pages, block_tokens, width], at offsets of pages, int64
    [n]; rows whose page is below 0 are dropped.
    """
    n, width = x.shape
    kernels.store_rows[n, triton.cdiv(width, _BLOCK)](
        x, store, pages, offsets, x.stride(0), store.stride(0), store.stride(1), width, BLOCK=_BLOCK
    )


class AddressedCopies(RowCopies):
    """Copies of rows by addresses. The word size is the largest that divides the rows of all
    tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], *, in_place: bool, max_rows: int) -> None:
        widths = [tensor[:1].nbytes for tensor in tensors]
        # One word size for all tensors, so that one launch copies them all.
        self._word_bytes = next(
            size for size in (8, 4, 2, 1) if not any(width % size for width in widths)
        )
        numbers = [
            (tensor.data_ptr(), width // self._word_bytes)
            for tensor, width in zip(tensors, widths, strict=True)
        ]
        self._in_place, self._own = in_place, on_device(numbers, tensors[0].device, torch.int64)
        max_words = max_rows * max(widths) // self._word_bytes
        self._grid = len(tensors), triton.cdiv(max_words, _COPIED_WORDS)

    def store(self, others: Tensor, rows: Tensor) -> None:
        self._copy(others, rows, loads=False)

    def load(self, others: Tensor, rows: Tensor) -> None:
        self._copy(others, rows, loads=True)

    def _copy(self, others: Tensor, rows: Tensor, *, loads: bool) -> None:
        sizes = {"WORD_BYTES": self._word_bytes, "BLOCK": _COPIED_WORDS}
        kernels.copy_rows[self._grid](
            self._own, others, rows, LOADS=loads, IN_PLACE=self._in_place, **sizes
        )


def _like(x: Tensor) -> Tensor:
    """Allocate rows of the same shape, without gaps."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))
