"""The gated unit of Llama's MLP, silu(gate) * up, and its gradients. Source: arXiv 2002.05202.

gate and up, [n, width], may be column slices of one tensor: their rows are read where they lie.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coserve.kernels.cpu import kernels_for_rows


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    kernels = kernels_for_rows(gate, up)
    if kernels is None:
        return torch.nn.functional.silu(gate) * up
    n, width = gate.shape
    assert up.shape == gate.shape
    y = torch.empty(n, width, dtype=gate.dtype)
    kernels.silu_mul(
        *(gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), y.data_ptr(), n, width),
        *(gate.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return y


class SiluMulGradients(NamedTuple):
    """Gradients of both factors; y again, if it was asked for."""

    gate: Tensor
    up: Tensor
    y: Tensor | None


def silu_mul_gradients(grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False) -> SiluMulGradients:
    """From the gradient of y [n, width]."""
    kernels = kernels_for_rows(grad, gate, up)
    if kernels is None:
        activated = torch.nn.functional.silu(gate)
        gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
        return SiluMulGradients(gate_grad, grad * activated, activated * up if with_y else None)
    n, width = gate.shape
    assert grad.shape == up.shape == gate.shape
    gate_grad, up_grad = (torch.empty(n, width, dtype=gate.dtype) for _ in range(2))
    y = torch.empty_like(gate_grad) if with_y else None
    kernels.silu_mul_gradient(
        *(grad.data_ptr(), grad.stride(0), gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0)),
        *(gate_grad.data_ptr(), up_grad.data_ptr(), None if y is None else y.data_ptr(), n, width),
        *(gate.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return SiluMulGradients(gate_grad, up_grad, y)
