"""Root-mean-square normalisation of the last `weight.shape[0]` features, the whole row or each head of it, and its
gradients. Source: arXiv 1910.07467.

Statistics and gradients are computed in float32 and rounded to the input's dtype, as transformers does.
"""

import torch
from torch import Tensor

from coserve.kernels.cpu import kernels_for_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x); x [n, width], weight [features], of which width is a multiple."""
    kernels = kernels_for_rows(x, weight)
    if kernels is None:
        return _scaled(_normalized(x, weight, eps)[0], x, weight)
    n, width = x.shape
    assert width % weight.shape[0] == 0
    y = torch.empty(n, width, dtype=x.dtype)
    kernels.rms_norm(
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), n, width, weight.shape[0], eps),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Gradient of x from that of y, both [n, width]; and y, if it is asked for."""
    kernels = kernels_for_rows(grad, x, weight)
    if kernels is None:
        normalized, scale = _normalized(x, weight, eps)
        weighted = _grouped(grad, weight) * weight.float()
        mean = (weighted * normalized).mean(-1, keepdim=True)
        x_grad = weighted.addcmul_(normalized, mean, value=-1).mul_(scale).flatten(-2).to(x.dtype)
        return x_grad, _scaled(normalized, x, weight) if with_y else None
    n, width = x.shape
    assert grad.shape == x.shape and width % weight.shape[0] == 0
    x_grad = torch.empty(n, width, dtype=x.dtype)
    y = torch.empty_like(x_grad) if with_y else None
    kernels.rms_norm_gradient(
        *(grad.data_ptr(), grad.stride(0), x.data_ptr(), x.stride(0), weight.data_ptr()),
        *(x_grad.data_ptr(), None if y is None else y.data_ptr(), n, width, weight.shape[0], eps),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return x_grad, y


def rms_norm_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient of the weight, float32."""
    return (_grouped(grad, weight) * _normalized(x, weight, eps)[0]).sum((0, 1))


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, width] as float32 [n, width / features, features]."""
    return x.float().view(x.shape[0], -1, weight.shape[0])


def _normalized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) and 1 / rms(x), float32."""
    grouped = _grouped(x, weight)
    # As fast as PyTorch gets it on a CPU: one pass, where the mean of the squares takes two.
    mean_square = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True).square_().div_(grouped.shape[-1])
    scale = mean_square.add_(eps).rsqrt_()
    return grouped * scale, scale


def _scaled(normalized: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return (normalized.to(x.dtype) * weight).flatten(-2)
