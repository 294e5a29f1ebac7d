"""Products of tiles, for all kernels."""

import torch
import triton
import triton.language as tl


def is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products are float32's: for rows in float32, and where kernels are
    interpreted, which has no other products of bfloat16.
    """
    return dtype == torch.float32 or device.type == "cpu"


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """Return a @ b of tiles, float32."""
    if EXACT:
        found = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        found = tl.dot(a, b)
    return found
