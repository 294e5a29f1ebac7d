"""Products of rows with a weight: y = x W^T, and the two products of its gradient.

Which way is fastest depends on the processor, the dtype and the number of rows;
`experiments/products.py` measures it.

- bfloat16 and few rows: kernels of our own read the weight once as it lies, in tiles with AMX and
  AMD's AVX-512 (`tile_products.py`; with the latter the fewest rows, and weights of no whole tiles,
  by pairs: `pair_products.cpp`), and in float32 elsewhere (`vector_products.cpp`); PyTorch's take
  twice as long, and rearrange the weight first.
- bfloat16 and many rows, with AMX: tiles, too, that are fetched while others are multiplied
  (`wide_tiles.cpp`, `wide_gradients.cpp`); but PyTorch's with many threads.
- The same on another CPU that multiplies bfloat16 faster than float32 (AMD's AVX-512): PyTorch's.
- The same on one that emulates it, at a quarter of its float32 speed, or whose instructions for it
  have half of that (Intel's without AMX): kernels of our own, which convert a strip of the weight
  at a time and multiply in float32 (`vector_panels.h`); of tensors that lie otherwise the wide
  functions convert a tile at a time, for PyTorch's.
- float32: kernels of our own of the same kind up to 128 rows (`vector_products.cpp`), PyTorch's
  beyond.
- int8 weights: with few rows the same kernels read them once as they lie (`int8.cpp`,
  `pair_products.cpp`, and `int8_tiles.cpp` with AMX); with many, a tile at a time becomes a dense
  weight.
- Otherwise the choice is PyTorch's.

In every case the sums are float32, and a product is rounded once.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from coserve.kernels.base import Factor, Grouped, JoinedRows, rows_of_owner
from coserve.kernels.cpu.compiled import Library
from coserve.kernels.cpu.low_rank import LowRankProducts
from coserve.kernels.cpu.processor import multiplies_bfloat16
from coserve.kernels.cpu.tile_products import TileProducts, are_bfloat16, fit_weight
from coserve.kernels.plain import products as plain

# Elements of a weight that are converted at once: they stay in the outer caches until they have
# been used.
_TILE_ELEMENTS = 1 << 21
# Maximum rows for which our own kernels without tiles multiply bfloat16, where PyTorch's product of
# more rows is faster: the kernel in float32, and the one by pairs.
_MAX_VECTOR_ROWS_NATIVE, _MAX_PAIR_ROWS = 16, 48
# The same for input gradients by pairs.
_MAX_PAIR_GRADIENT_ROWS = 64
# The same for float32 rows and weights; from how many outputs and inputs on, which leaves out the
# factors of a LoRA.
MAX_FLOAT32_ROWS, _MIN_FLOAT32_COLUMNS = 128, 32
# Maximum float32 rows, in a step without a job's rows, that read a weight as it lies and sum along
# it. A job's rows have the same sums alone and in any company.
FEW_FLOAT32_ROWS = 4
# Minimum rows for which a conversion pays for the products of gradients.
_MIN_WIDE_ROWS = 16
# Maximum rows of each of several adapters for which our own kernel computes a product from their
# rank, all in one call.
_MAX_MADE_ROWS = 128
# Held while factors are rounded.
_ROUNDING = Lock()
# Maximum rows, exclusive, for which float32 products are faster with the weight as the left factor.
_FEW_ROWS = 48
# Minimum outputs (a vocabulary) for which a result for a loss is left lying by columns: the product
# then takes half of the time, and the loss of its logits, which has kernels for that, hardly more.
# Choosing a token of each row from it would take forty times as long.
_MANY_OUTPUTS = 1 << 15
# Minimum rows for that, where there is a skinny GEMM that leaves fewer by rows: the head's input
# gradient then comes from the logits as they lie, which reads the head's weight once less.
_MANY_LOSS_ROWS = 32
# Maximum rows for which our own kernel multiplies int8 weights: with instructions for bfloat16, and
# without.
_MAX_INT8_ROWS_NATIVE, _MAX_INT8_ROWS = 8, 32


class CpuProducts:
    """The products of a CPU backend: by kernels of our own where they are faster, by PyTorch
    elsewhere.

    `tiles` has those in tiles, where there are any.

    Args:
        may_lie_by_columns: whether products of many outputs may be left with their columns
            contiguous instead of their rows.
    """

    def __init__(self, kernels: Library, *, may_lie_by_columns: bool = False) -> None:
        self._kernels = kernels
        self._may_lie_by_columns = may_lie_by_columns
        self.tiles = TileProducts(kernels) if kernels.has_tiles else None
        self._low_rank = LowRankProducts(kernels)
        name, self._most_few_rows = kernel_for_few_rows(kernels)
        self._few_rows = getattr(kernels, name)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return y = x W^T + b; x [n, in], weight [out, in], bias [out] -> [n, out]."""
        if x.dtype != torch.bfloat16 or not x.shape[0]:
            if _are_few_float32_rows(x, weight, bias):
                return self._product_of_few_rows(self._kernels.float32_product, x, weight, bias, 0)
            return torch.nn.functional.linear(x, weight, bias)
        if self.tiles is not None:
            is_for_columns = (
                x.shape[0] >= _MANY_LOSS_ROWS and weight.shape[0] >= _MANY_OUTPUTS and bias is None
            )
            if self._may_lie_by_columns and is_for_columns:
                return torch.mm(weight, x.T).T
            if (y := self.tiles.product(x, weight, bias)) is not None:
                return y
        if x.shape[0] <= self._most_few_rows and x.stride(1) == 1 and fit_vectors(weight, bias):
            return self._product_of_few_rows(self._few_rows, x, weight, bias)
        return (
            wide_product(x, weight, bias)
            if is_widened(x)
            else torch.nn.functional.linear(x, weight, bias)
        )

    def _product_of_few_rows(
        self,
        multiply: Callable[..., None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *more: int,
    ) -> Tensor:
        (n, inner), outer = x.shape, weight.shape[0]
        assert weight.shape == (outer, inner)
        y = torch.empty(n, outer, dtype=x.dtype)
        multiply(
            *(
                x.data_ptr(),
                x.stride(0),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                y.data_ptr(),
            ),
            *(n, inner, outer, *more, torch.get_num_threads()),
        )
        return y

    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dx = dy W; grad [n, out], weight [out, in] -> [n, in]. It is rounded once, unless
        `_added` adds it.
        """
        if (
            self.tiles is not None
            and (found := self.tiles.input_gradient(grad, weight, onto)) is not None
        ):
            return found
        if self._fit_pairs(grad, weight, onto):
            return self._pair_input_gradient(grad, weight, onto)
        if is_widened(grad) and grad.shape[0] and grad.stride(1) == 1 and fit_vectors(weight, None):
            return _added(
                self._vector_input_gradient(self._kernels.vector_input_gradient, grad, weight), onto
            )
        if _are_few_float32_rows(grad, weight, None):
            return _added(
                self._vector_input_gradient(self._kernels.float32_input_gradient, grad, weight),
                onto,
            )
        if is_widened(grad) and grad.shape[0] >= _MIN_WIDE_ROWS:
            return _added(wide_input_gradient(grad, weight), onto)
        return grad @ weight if onto is None else onto.addmm_(grad, weight)

    def _fit_pairs(self, grad: Tensor, weight: Tensor, onto: Tensor | None) -> bool:
        if not self._kernels.has_pairs or not 0 < grad.shape[0] <= _MAX_PAIR_GRADIENT_ROWS:
            return False
        if onto is not None and (onto.dtype != grad.dtype or onto.stride(1) != 1):
            return False
        return are_bfloat16(grad, weight) and grad.stride(1) == 1 and fit_weight(weight, None)

    def _pair_input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None) -> Tensor:
        (n, outer), inner = grad.shape, weight.shape[1]
        assert weight.shape == (outer, inner)
        x_grad = torch.empty(n, inner, dtype=grad.dtype) if onto is None else onto
        self._kernels.pair_input_gradient(
            *(
                grad.data_ptr(),
                grad.stride(0),
                weight.data_ptr(),
                x_grad.data_ptr(),
                x_grad.stride(0),
            ),
            *(onto is not None, n, inner, outer, torch.get_num_threads()),
        )
        return x_grad

    def _vector_input_gradient(
        self, multiply: Callable[..., None], grad: Tensor, weight: Tensor
    ) -> Tensor:
        (n, outer), inner = grad.shape, weight.shape[1]
        assert weight.shape == (outer, inner)
        x_grad = torch.empty(n, inner, dtype=grad.dtype)
        multiply(
            *(grad.data_ptr(), grad.stride(0), weight.data_ptr(), x_grad.data_ptr()),
            *(n, inner, outer, torch.get_num_threads()),
        )
        return x_grad

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return dW = dy^T x; grad [n, out], x [n, in] -> [out, in], in float32 where that costs
        nothing.
        """
        if is_widened(grad) and grad.shape[0] >= _MIN_WIDE_ROWS:
            return wide_weight_gradient(grad, x)
        return grad.T @ x

    # -- int8 weights -------------------------------------------------------------------

    def int8_product(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Implement `Backend.int8_product`."""
        has_native = has_native_bf16(x)
        if (
            self.tiles is not None
            and (y := self.tiles.int8_skinny_gemm(x, values, scales, bias)) is not None
        ):
            return y
        name, max_rows = kernel_for_few_int8_rows(self._kernels, x.dtype)
        if 0 < x.shape[0] <= max_rows and _is_for_int8(x, bias):
            return self._int8_skinny_gemm(name, x, values, scales, bias)
        if not has_native:
            return plain.int8_product(x, values, scales, bias)
        y = torch.empty(x.shape[0], values.shape[0], dtype=x.dtype)
        for tile, weight in self._bfloat16_tiles(values, scales):
            y[:, tile] = self.product(x, weight, None if bias is None else bias[tile])
        return y

    def int8_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        """Implement `Backend.int8_input_gradient`."""
        if not has_native_bf16(grad):
            return plain.int8_input_gradient(grad, values, scales, onto)
        total = torch.zeros(grad.shape[0], values.shape[1], dtype=torch.float32)
        for tile, weight in self._bfloat16_tiles(values, scales):
            total += grad[:, tile] @ weight
        return _added(total.to(grad.dtype), onto)

    def _int8_skinny_gemm(
        self, name: str, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None
    ) -> Tensor:
        (n, inner), outer = x.shape, values.shape[0]
        assert values.shape == (outer, inner) and values.is_contiguous() and scales.is_contiguous()
        y = torch.empty(n, outer, dtype=x.dtype)
        getattr(self._kernels, name)(
            *(x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr()),
            *(None if bias is None else bias.data_ptr(), y.data_ptr()),
            *(n, inner, outer, torch.get_num_threads()),
        )
        return y

    def _bfloat16_tiles(self, values: Tensor, scales: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield runs of an int8 weight's rows as bfloat16 weights, each valid until the next."""
        tiles = _tiles(values)
        made = torch.empty(tiles[0].stop, values.shape[1], dtype=torch.bfloat16)
        for tile in tiles:
            weight = made[: tile.stop - tile.start]
            self._kernels.int8_to_bfloat16(
                *(values[tile].data_ptr(), scales[tile].data_ptr(), weight.data_ptr()),
                *(*weight.shape, torch.get_num_threads()),
            )
            yield tile, weight

    # -- factors of low rank --------------------------------------------------------------

    def low_rank_product(self, x: Tensor, factor: Factor, onto: Tensor | None = None) -> Tensor:
        """Return x F^T; F [out, in], where out or in is the rank. Added to `onto` it is rounded
        once, unless bfloat16 is widened.
        """
        if (found := self._low_rank_rows(x, factor, onto, transposed=True)) is not None:
            return found
        if isinstance(factor, Grouped):
            return _each(self.low_rank_product, x, factor, factor.tensors[0].shape[0], onto)
        if onto is None:
            return self.product(x, factor)
        if is_widened(x) and x.shape[0] >= _MIN_WIDE_ROWS:
            return onto.add_(self.product(x, factor))
        return onto.addmm_(x, factor.T)

    def low_rank_input_gradient(
        self, grad: Tensor, factor: Factor, onto: Tensor | None = None
    ) -> Tensor:
        """Return dx = dy F."""
        if (found := self._low_rank_rows(grad, factor, onto, transposed=False)) is not None:
            return found
        if isinstance(factor, Grouped):
            return _each(
                self.low_rank_input_gradient, grad, factor, factor.tensors[0].shape[1], onto
            )
        return self.input_gradient(grad, factor, onto)

    def _low_rank_rows(
        self, x: Tensor, factor: Factor, onto: Tensor | None, *, transposed: bool
    ) -> Tensor | None:
        """Return x F^T (transposed) or x F by our kernels, if they are for these tensors."""
        own = self._low_rank
        if onto is not None:
            return onto if own.add_from_low_rank(onto, x, factor, transposed=transposed) else None
        if (narrow := own.to_low_rank(x, factor, transposed=transposed)) is not None:
            return narrow
        # PyTorch's product of many rows of an adapter takes two thirds of the time.
        has_few_rows = isinstance(factor, Grouped) and x.shape[0] <= _MAX_MADE_ROWS * len(
            factor.tensors
        )
        return own.from_low_rank(x, factor, transposed=transposed) if has_few_rows else None

    def add_low_rank_gradient(self, grad: Tensor, x: Tensor | JoinedRows, onto: Factor) -> None:
        """Add dF = dy^T x to a float32 sum, of each adapter's rows to its own."""
        own = self._low_rank
        if own.add_low_rank_gradient(onto, grad, x, transposed=False):
            return
        if own.add_low_rank_gradient(onto, x, grad, transposed=True):
            return
        if isinstance(onto, Grouped):
            for index, (rows, total) in enumerate(zip(onto.rows.slices, onto.tensors, strict=True)):
                self.add_low_rank_gradient(grad[rows], rows_of_owner(x, index, rows), total)
            return
        assert isinstance(x, Tensor), "rows of one adapter"
        if grad.dtype == onto.dtype:
            onto.addmm_(grad.T, x)
        else:
            onto.add_(self.weight_gradient(grad, x))


def _each(
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    factor: Grouped,
    width: int,
    onto: Tensor | None,
) -> Tensor:
    """Multiply rows of several adapters with the factor of each, added to `onto` or put side by
    side. No factor is copied: on a CPU that would take as long as the product.
    """
    y = x.new_empty(x.shape[0], width) if onto is None else onto
    for own, matrix in zip(factor.rows.slices, factor.tensors, strict=True):
        if onto is None:
            y[own] = multiply(x[own], matrix, None)
        else:
            multiply(x[own], matrix, y[own])
    return y


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the `product` in float32 arithmetic, rounded to x's dtype."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    rows = x.float()
    for tile in _tiles(weight):
        if x.shape[0] < _FEW_ROWS:
            y = torch.mm(weight[tile].float(), rows.T).T
        else:
            y = torch.mm(rows, weight[tile].float().T)
        out[:, tile] = y if bias is None else y.add_(bias[tile])
    return out


def wide_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the `input_gradient` in float32 arithmetic, rounded to grad's dtype."""
    tiles = _tiles(weight)
    total = torch.mm(grad[:, tiles[0]].float(), weight[tiles[0]].float())
    for tile in tiles[1:]:
        total.addmm_(grad[:, tile].float(), weight[tile].float())
    return total.to(grad.dtype)


def wide_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the `weight_gradient` in float32."""
    return torch.mm(grad.float().T, x.float())


def _tiles(weight: Tensor) -> list[slice]:
    """Return runs of a weight's rows."""
    num_rows, size = weight.shape[0], max(1, _TILE_ELEMENTS // weight.shape[1])
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _added(found: Tensor, onto: Tensor | None) -> Tensor:
    return found if onto is None else onto.add_(found)


def kernel_for_few_int8_rows(kernels: Library, dtype: torch.dtype) -> tuple[str, int]:
    """Return the name of our own kernel for int8 weights and rows of a dtype, and the maximum
    number of rows for which it is the fastest.
    """
    if dtype != torch.bfloat16:
        return "int8_product_float32", _MAX_INT8_ROWS
    if kernel_for_few_rows(kernels)[0] == "pair_product":
        return "int8_pair_product", _MAX_PAIR_ROWS
    return (
        "int8_product_bfloat16",
        _MAX_INT8_ROWS_NATIVE if multiplies_bfloat16() else _MAX_INT8_ROWS,
    )


def _is_for_int8(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether our kernel is for such rows: float32 or bfloat16, no gaps within a row."""
    if x.dtype not in (torch.float32, torch.bfloat16) or x.stride(1) != 1:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.is_contiguous())


@contextmanager
def rounded_factors() -> Iterator[None]:
    """Round both factors of float32 products within to bfloat16, and nothing else: sums and results
    stay float32. Products of factors that were bfloat16 before are exact. For CPUs with
    instructions for that.

    The setting is the process's: no other thread may be within at the same time, and float32
    products of other threads meanwhile are rounded, too.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _ROUNDING:
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before


def kernel_for_few_rows(kernels: Library) -> tuple[str, int]:
    """Return the name of our own kernel for products of bfloat16 without tiles, and the maximum
    number of rows for which it is the fastest; any number where float32 is faster.
    """
    if not multiplies_bfloat16():
        return "vector_product", sys.maxsize
    return (
        ("pair_product", _MAX_PAIR_ROWS)
        if kernels.has_pairs
        else ("vector_product", _MAX_VECTOR_ROWS_NATIVE)
    )


def fit_vectors(weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether our kernels without tiles are for a weight [out, in] and a bias: of this
    dtype, lying by rows.
    """
    for tensor in (weight, bias):
        if tensor is not None and not (
            tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()
        ):
            return False
    return True


def _are_few_float32_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dtype != torch.float32 or not 0 < x.shape[0] <= MAX_FLOAT32_ROWS:
        return False
    return x.stride(1) == 1 and fit_float32(weight, bias)


def fit_float32(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether our kernel for float32 is for a weight [out, in] and a bias."""
    return min(weight.shape) >= _MIN_FLOAT32_COLUMNS and fit_vectors(weight, bias, torch.float32)


def has_native_bf16(x: Tensor) -> bool:
    """Return whether rows are bfloat16 on a CPU that multiplies it faster than float32."""
    return x.dtype == torch.bfloat16 and x.is_cpu and multiplies_bfloat16()


def is_widened(x: Tensor) -> bool:
    """Return whether rows are bfloat16 on a CPU that multiplies float32 faster."""
    return x.dtype == torch.bfloat16 and x.is_cpu and not multiplies_bfloat16()
