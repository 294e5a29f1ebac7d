"""Products with factors of low rank, such as a LoRA's (A [rank, width], B [width, rank]), and their
gradients, by kernels of our own: bfloat16, with float32 sums that are rounded once.

They work in tiles where the processor has some (`low_rank.cpp`), in float32 elsewhere
(`vector_low_rank.cpp`). A library's product takes several times as long as reading the wide tensor.
Rows of many adapters, each with its own factor, are one call (`low_rank_jobs.h`). Each function
returns None, or False, when it is not for these tensors.
"""

from collections.abc import Callable, Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from coserve.kernels.base import Factor, Grouped, JoinedRows
from coserve.kernels.cpu.compiled import Library
from coserve.kernels.cpu.tile_products import are_bfloat16

_MAX_RANK = 64
# Elements of the wide tensor below which a second thread takes longer to begin than it helps.
_ONE_THREAD_ELEMENTS = 1 << 13


class LowRankProducts:
    """The kernels of a library for this processor."""

    def __init__(self, kernels: Library) -> None:
        has_tiles = kernels.has_tiles
        self._to_low_rank = kernels.to_low_rank if has_tiles else kernels.vector_to_low_rank
        self._from_low_rank = kernels.from_low_rank if has_tiles else kernels.vector_from_low_rank
        self._gradient = (
            kernels.add_low_rank_gradient if has_tiles else kernels.vector_low_rank_gradient
        )

    def to_low_rank(self, x: Tensor, factor: Factor, *, transposed: bool) -> Tensor | None:
        """Return x M: x [n, width], M [width, rank], given as its transpose or not -> [n, rank]."""
        matrices = _matrices(factor)
        y = x.new_empty(x.shape[0], matrices[0].shape[0 if transposed else 1])
        fits = are_bfloat16(*matrices)
        return (
            y
            if fits and _run(self._to_low_rank, x, y, factor, [transposed], by_rank=transposed)
            else None
        )

    def from_low_rank(self, x: Tensor, factor: Factor, *, transposed: bool) -> Tensor | None:
        """Return x M: x [n, rank], M [rank, width], given as its transpose or not -> [n, width]."""
        y = x.new_empty(x.shape[0], _matrices(factor)[0].shape[0 if transposed else 1])
        return y if self._from(y, x, factor, transposed, adds=False) else None

    def add_from_low_rank(
        self, total: Tensor, x: Tensor, factor: Factor, *, transposed: bool
    ) -> bool:
        """Add x M to total: total [n, width], x [n, rank], M [rank, width], given as its transpose
        or not. Return whether it did.
        """
        return self._from(total, x, factor, transposed, adds=True)

    def _from(self, y: Tensor, x: Tensor, factor: Factor, transposed: bool, *, adds: bool) -> bool:
        fits = are_bfloat16(*_matrices(factor))
        return fits and _run(
            self._from_low_rank, y, x, factor, [transposed, adds], by_rank=not transposed
        )

    def add_low_rank_gradient(
        self,
        total: Factor,
        narrow: Tensor | JoinedRows,
        wide: Tensor | JoinedRows,
        *,
        transposed: bool,
    ) -> bool:
        """Add narrow^T wide, or its transpose, to total: narrow [n, rank], wide [n, width], total
        float32 [rank, width] or [width, rank]. Return whether it did.
        """
        fits = all(sums.dtype == torch.float32 for sums in _matrices(total))
        return fits and _run(
            self._gradient, wide, narrow, total, [transposed], by_rank=not transposed
        )


def _run(
    kernel: Callable[..., None],
    wide: Tensor | JoinedRows,
    narrow: Tensor | JoinedRows,
    factor: Factor,
    settings: Sequence[bool],
    *,
    by_rank: bool,
) -> bool:
    """Call a kernel with a table of each adapter's rows, [n, width] and [n, rank]
    (`low_rank_jobs.h`).

    Args:
        settings: arguments of the kernel after the table.
        by_rank: whether factors are [rank, width]; otherwise [width, rank].

    Returns:
        Whether it ran: it may not be for these rows or shapes.
    """
    matrices = _matrices(factor)
    rank, width = matrices[0].shape if by_rank else reversed(matrices[0].shape)
    if not 0 < rank <= _MAX_RANK < width or width % 32:
        return False
    for matrix in matrices:
        if matrix.shape != matrices[0].shape or not matrix.is_contiguous() or not matrix.is_cpu:
            return False
    sizes = factor.rows.sizes if isinstance(factor, Grouped) else _sizes(wide)
    if not all(sizes) or not _are_rows(wide, sizes, width) or not _are_rows(narrow, sizes, rank):
        return False
    table = list[int]()
    for size, matrix, *rows in zip(
        sizes, matrices, _places(wide, sizes), _places(narrow, sizes), strict=True
    ):
        for place in rows:
            table += place
        table += (matrix.data_ptr(), size)
    num_threads = 1 if sum(sizes) * width <= _ONE_THREAD_ELEMENTS else torch.get_num_threads()
    kernel((c_int64 * len(table))(*table), len(sizes), *settings, width, rank, num_threads)
    return True


def _matrices(factor: Factor) -> tuple[Tensor, ...]:
    return factor.tensors if isinstance(factor, Grouped) else (factor,)


def _sizes(x: Tensor | JoinedRows) -> tuple[int, ...]:
    return (
        tuple(rows.shape[0] for rows in x.tensors) if isinstance(x, JoinedRows) else (x.shape[0],)
    )


def _are_rows(x: Tensor | JoinedRows, sizes: Sequence[int], width: int) -> bool:
    """Return whether a kernel can read them as the rows of as many adapters."""
    if isinstance(x, JoinedRows):
        return (
            _sizes(x) == sizes
            and are_bfloat16(*x.tensors)
            and all(rows.shape[1] == width for rows in x.tensors)
        )
    return x.shape == (sum(sizes), width) and are_bfloat16(x)


def _places(x: Tensor | JoinedRows, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the address of each adapter's rows, and the step from one row to the next."""
    if isinstance(x, JoinedRows):
        return [(rows.data_ptr(), rows.stride(0)) for rows in x.tensors]
    address, step, found = x.data_ptr(), x.stride(0), []
    for size in sizes:
        found.append((address, step))
        address += size * step * x.itemsize
    return found
