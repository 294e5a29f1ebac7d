"""Operations row by row: norms, gated units, rotary positions.

Statistics and gradients of norms are computed in float32 and rounded to the input's dtype; every
product and every sum of a rotation is rounded to it, as transformers does.
"""

import torch
from torch import Tensor

from coserve.kernels.base import SiluMulGradients


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `Backend.rms_norm`."""
    return _scaled(_normalized(x, weight, eps)[0], x, weight)


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Implement `Backend.rms_norm_gradient`."""
    normalized, scale = _normalized(x, weight, eps)
    weighted = _grouped(grad, weight) * weight.float()
    mean = (weighted * normalized).mean(-1, keepdim=True)
    x_grad = weighted.addcmul_(normalized, mean, value=-1).mul_(scale).flatten(-2).to(x.dtype)
    return x_grad, _scaled(normalized, x, weight) if with_y else None


def rms_norm_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `Backend.rms_norm_weight_gradient`."""
    return (_grouped(grad, weight) * _normalized(x, weight, eps)[0]).sum((0, 1))


def silu_mul_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
) -> SiluMulGradients:
    """Implement `Backend.silu_mul_gradients`."""
    activated = torch.nn.functional.silu(gate)
    gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
    return SiluMulGradients(gate_grad, grad * activated, activated * up if with_y else None)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement `Backend.rope`."""
    x, cos, sin = _by_head(x, cos, sin)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).flatten(1)


def rope_gradient(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement `Backend.rope_gradient`."""
    grad, cos, sin = _by_head(grad, cos, sin)
    first, second = (grad * sin).chunk(2, -1)
    return (grad * cos + torch.cat((second, -first), -1)).flatten(1)


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [n, width] as float32 [n, width / features, features]."""
    return x.float().view(x.shape[0], -1, weight.shape[0])


def _normalized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) and 1 / rms(x), float32."""
    grouped = _grouped(x, weight)
    # One pass, the fastest that PyTorch offers on a CPU; the mean of the squares takes two.
    mean_square = (
        torch.linalg.vector_norm(grouped, dim=-1, keepdim=True).square_().div_(grouped.shape[-1])
    )
    scale = mean_square.add_(eps).rsqrt_()
    return grouped * scale, scale


def _scaled(normalized: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return (normalized.to(x.dtype) * weight).flatten(-2)


def _by_head(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.view(x.shape[0], -1, cos.shape[1]), cos[:, None], sin[:, None]
