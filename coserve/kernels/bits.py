"""Signs as bits: one bit per element where a derivative needs no more."""

import torch
from torch import Tensor

_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def packed_width(width: int) -> int:
    """Return the bytes per row that `pack_signs` needs for rows of `width` elements."""
    return -(-width // 8)


def pack_signs(x: Tensor) -> Tensor:
    """Return, for x [n, width], uint8 [n, ceil(width / 8)]; a bit is set where x > 0."""
    padded = torch.nn.functional.pad(x > 0, (0, -x.shape[1] % 8)).view(x.shape[0], -1, 8)
    return (padded * torch.tensor(_BITS, dtype=torch.uint8, device=x.device)).sum(
        -1, dtype=torch.uint8
    )


def unpack_signs(bits: Tensor, width: int) -> Tensor:
    """Return packed signs, uint8 [n, ceil(width / 8)], as bool [n, width]."""
    spread = bits[..., None] & torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (spread != 0).flatten(1)[:, :width]
