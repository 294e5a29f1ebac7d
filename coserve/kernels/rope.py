"""Rotary position embedding, in the half-split layout of the Hugging Face checkpoints, and its gradient. Source: arXiv
2104.09864.

Every product and every sum is rounded to x's dtype, as transformers does.
"""

import torch
from torch import Tensor

from coserve.kernels.cpu import kernels_for_rows


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x by its row's angles; x [n, heads * D], maybe a column slice, cos and sin [n, D]."""
    rotated = _rotated(x, cos, sin, reverse=False)
    if rotated is not None:
        return rotated
    x, cos, sin = _by_head(x, cos, sin)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).flatten(1)


def rope_gradient(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of x from that of the rotated, both [n, heads * D]."""
    rotated = _rotated(grad, cos, sin, reverse=True)
    if rotated is not None:
        return rotated
    grad, cos, sin = _by_head(grad, cos, sin)
    first, second = (grad * sin).chunk(2, -1)
    return (grad * cos + torch.cat((second, -first), -1)).flatten(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, reverse: bool) -> Tensor | None:
    kernels = kernels_for_rows(x, cos, sin)
    if kernels is None:
        return None
    n, width = x.shape
    assert cos.shape == sin.shape == (n, cos.shape[1]) and width % cos.shape[1] == 0
    y = torch.empty(n, width, dtype=x.dtype)
    kernels.rope(
        *(x.data_ptr(), x.stride(0), cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), y.data_ptr()),
        *(n, width, cos.shape[1], reverse, x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


def _by_head(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.view(x.shape[0], -1, cos.shape[1]), cos[:, None], sin[:, None]
