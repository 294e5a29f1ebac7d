"""Products of rows with a weight: y = x W^T, and the two products of its gradient.

Which way is fastest depends on the device, the dtype and the number of rows; `benchmarks/products.py` measures it.

- A CPU with instructions for bfloat16 (AMX, AVX-512): a weight as the left factor streams through once as it lies,
  while a weight as the right factor is rearranged first; with few rows that is a third of the time. With AMX our own
  kernels (`amx.py`) take half to three quarters of what PyTorch's then takes.
- A CPU that has no such instruction emulates them at a quarter of its float32 speed; there the wide functions convert a
  tile of the weight at a time, and multiply in float32.
- Otherwise the choice is PyTorch's.

In every case the sums are float32, and a product is rounded once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from coserve.kernels.amx import add_from_low_rank, low_rank_gradient, skinny_gemm, to_low_rank

# Elements of a weight that are converted at once: they stay in the outer caches until they have been used.
_TILE_ELEMENTS = 1 << 21
# From how many rows on a conversion pays.
_MIN_WIDE_ROWS = 16
# Held while factors are rounded.
_ROUNDING = Lock()
# Below how many rows float32 products are faster with the weight as the left factor.
_FEW_ROWS = 48
# The same for products by instructions for bfloat16.
_FEW_BFLOAT16_ROWS = 24


def stored(weight: Tensor) -> Tensor:
    """A weight [out, in] laid out as products read it: on CPUs by its columns, but for native bfloat16.

    PyTorch's float32 products of 8 rows then take two thirds of the time; with many rows it is the same.
    """
    if weight.device.type != "cpu" or has_native_bf16(weight):
        return weight.contiguous()
    return weight.T.contiguous().T


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b; x [n, in], weight [out, in], bias [out] -> [n, out]."""
    if _is_emulated(x) and x.shape[0] >= _MIN_WIDE_ROWS:
        return wide_product(x, weight, bias)
    if has_native_bf16(x):
        narrow = to_low_rank(x, weight, transposed=True) if bias is None else None
        y = skinny_gemm(x, weight, bias) if narrow is None else narrow
        if y is not None:
            return y
        if 0 < x.shape[0] < _FEW_BFLOAT16_ROWS:
            return left_product(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total += x W^T; x [n, in], weight [out, in], total [n, out]. Rounded once, unless bfloat16 is emulated."""
    if _is_emulated(x) and x.shape[0] >= _MIN_WIDE_ROWS:
        total += wide_product(x, weight)
    elif not (has_native_bf16(x) and add_from_low_rank(total, x, weight, transposed=True)):
        total.addmm_(x, weight.T)


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`product` of the same rows with several weights; with those that `join` laid side by side, as one."""
    whole = _joined(weights)
    bias = None if biases[0] is None else _joined(biases)
    if whole is None or (bias is None and any(each is not None for each in biases)):
        return tuple(product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return torch.split(product(x, whole, bias), [weight.shape[0] for weight in weights], -1)


def join(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same weights [out, in] or biases [out] in one piece of memory, which `products` recognizes."""
    whole = torch.cat(list(tensors))
    if whole.dim() > 1:
        whole = stored(whole)
    return list(torch.split(whole, [tensor.shape[0] for tensor in tensors]))


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The one tensor whose rows these are; None if they lie anywhere."""
    first = tensors[0]
    assert first is not None
    memory, stride = first.untyped_storage().data_ptr(), first.stride()
    offset, num_rows = first.storage_offset(), 0
    for tensor in tensors:
        if tensor is None or tensor.untyped_storage().data_ptr() != memory:
            return None
        if tensor.stride() != stride or tensor.storage_offset() != offset + num_rows * stride[0]:
            return None
        num_rows += tensor.shape[0]
    return first.as_strided((num_rows, *first.shape[1:]), stride)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """dx = dy W; grad [n, out], weight [out, in] -> [n, in]."""
    if _is_emulated(grad) and grad.shape[0] >= _MIN_WIDE_ROWS:
        return wide_input_gradient(grad, weight)
    narrow = to_low_rank(grad, weight, transposed=False) if has_native_bf16(grad) else None
    return grad @ weight if narrow is None else narrow


def add_input_gradient(total: Tensor, grad: Tensor, weight: Tensor) -> None:
    """total += dy W; grad [n, out], weight [out, in], total [n, in]. Rounded once, unless bfloat16 is emulated."""
    if _is_emulated(grad) and grad.shape[0] >= _MIN_WIDE_ROWS:
        total += wide_input_gradient(grad, weight)
    elif not (has_native_bf16(grad) and add_from_low_rank(total, grad, weight, transposed=False)):
        total.addmm_(grad, weight)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dW = dy^T x; grad [n, out], x [n, in] -> [out, in], in float32 where that costs nothing."""
    if _is_emulated(grad) and grad.shape[0] >= _MIN_WIDE_ROWS:
        return wide_weight_gradient(grad, x)
    if has_native_bf16(grad):
        found = low_rank_gradient(grad, x, transposed=False)
        found = low_rank_gradient(x, grad, transposed=True) if found is None else found
        if found is not None:
            return found
    return grad.T @ x


def left_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` with the weight as the left factor, for few rows, at least one."""
    if x.shape[0] == 1:
        y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return y[None]
    y = torch.mm(weight, x.T) if bias is None else torch.addmm(bias[:, None], weight, x.T)
    return torch.stack(y.unbind(1))  # half of what a transposed copy takes


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` in float32 arithmetic, rounded to x's dtype."""
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
    """`input_gradient` in float32 arithmetic, rounded to grad's dtype."""
    tiles = _tiles(weight)
    total = torch.mm(grad[:, tiles[0]].float(), weight[tiles[0]].float())
    for tile in tiles[1:]:
        total.addmm_(grad[:, tile].float(), weight[tile].float())
    return total.to(grad.dtype)


def wide_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`weight_gradient` in float32."""
    return torch.mm(grad.float().T, x.float())


def _tiles(weight: Tensor) -> list[slice]:
    """Runs of a weight's rows."""
    num_rows, size = weight.shape[0], max(1, _TILE_ELEMENTS // weight.shape[1])
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


@contextmanager
def rounded_factors() -> Iterator[None]:
    """Products of float32 tensors within round both factors to bfloat16, and nothing else: sums and results stay
    float32. Of factors that were bfloat16 before, they are exact. For CPUs with instructions for that.

    The setting is the process's: no other thread may be within at the same time, and what float32 products others do
    meanwhile are rounded, too.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _ROUNDING:
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before


def has_native_bf16(x: Tensor) -> bool:
    """Whether it is bfloat16 on a CPU that has instructions for its products."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _multiplies_bfloat16()


def _is_emulated(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _multiplies_bfloat16()


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has an instruction for sums of products of bfloat16."""
    found = torch.cpu.get_capabilities()
    return any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
