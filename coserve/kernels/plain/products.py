"""Products with int8 weights: a tile of the weight is dequantised at a time, so that the whole
never exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of a weight that are dequantised at once: on a CPU they stay in the outer caches until
# they have been used.
_TILE_ELEMENTS = 1 << 21


def int8_product(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `Backend.int8_product`. The whole numbers are exact in every compute dtype; scales
    multiply the sums.
    """
    y = torch.empty(x.shape[0], values.shape[0], dtype=x.dtype, device=x.device)
    wide = x.float()
    for tile in _tiles(values):
        sums = (wide @ values[tile].float().T).mul_(scales[tile])
        y[:, tile] = sums if bias is None else sums.add_(bias[tile])
    return y


def int8_input_gradient(
    grad: Tensor, values: Tensor, scales: Tensor, onto: Tensor | None
) -> Tensor:
    """Implement `Backend.int8_input_gradient`; scales multiply the gradient."""
    total = torch.zeros(grad.shape[0], values.shape[1], dtype=torch.float32, device=grad.device)
    for tile in _tiles(values):
        total.addmm_(grad[:, tile].float() * scales[tile], values[tile].float())
    return total.to(grad.dtype) if onto is None else onto.add_(total)


def _tiles(values: Tensor) -> Iterator[slice]:
    """Yield runs of a weight's rows."""
    num_rows, size = values.shape[0], max(1, _TILE_ELEMENTS // values.shape[1])
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))
