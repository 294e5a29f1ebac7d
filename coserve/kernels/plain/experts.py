"""Products of groups of rows, each with a matrix of its own: `grouped_mm` of PyTorch, or, for
shapes that it does not take (rows of less than 16 bytes, or not a multiple of that), row by row
with the matrix of each.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

# Bytes of which `grouped_mm` wants a row to be a multiple.
_ALIGNMENT = 16
# Elements of matrices that are gathered at once.
_TILE_ELEMENTS = 1 << 22


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Implement `Backend.grouped_product`."""
    if _fits(x.itemsize, *weight.shape[1:]):
        return grouped_mm(x, weight.mT, offs=ends)
    y, groups = x.new_empty(x.shape[0], weight.shape[1]), _groups(x.shape[0], ends)
    for rows in _tiles(x.shape[0], weight[0].numel()):
        y[rows] = torch.bmm(weight[groups[rows]], x[rows, :, None])[..., 0]
    return y


def int8_grouped_product(x: Tensor, values: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """Implement `Backend.int8_grouped_product`.

    The whole numbers are exact in every compute dtype; scales multiply the sums. Only matrices that
    have rows are converted, a tile of them at a time.
    """
    groups, y = _groups(x.shape[0], ends), x.new_empty(x.shape[0], values.shape[1])
    for rows, some, ends_here in _runs_of_groups(ends, values[0].numel()):
        y[rows] = grouped_product(x[rows], values[some].to(x.dtype), ends_here)
    return (y.float() * scales[groups]).to(x.dtype)


def int8_grouped_input_gradient(
    grad: Tensor, values: Tensor, scales: Tensor, ends: Tensor
) -> Tensor:
    """Implement `Backend.int8_grouped_input_gradient`; scales multiply the gradient."""
    scaled = (grad.float() * scales[_groups(grad.shape[0], ends)]).to(grad.dtype)
    dx = grad.new_empty(grad.shape[0], values.shape[2])
    for rows, some, ends_here in _runs_of_groups(ends, values[0].numel()):
        dx[rows] = grouped_product(scaled[rows], values[some].to(grad.dtype).mT, ends_here)
    return dx


def grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Implement `Backend.grouped_weight_gradient`."""
    if _fits(x.itemsize, grad.shape[1], x.shape[1]):
        return grouped_mm(grad.mT, x, offs=ends).float()
    total = torch.zeros(
        ends.shape[0], grad.shape[1], x.shape[1], dtype=torch.float32, device=x.device
    )
    groups = _groups(x.shape[0], ends)
    for rows in _tiles(x.shape[0], total[0].numel()):
        total.index_add_(
            0, groups[rows], torch.bmm(grad[rows, :, None].float(), x[rows, None].float())
        )
    return total


def _fits(itemsize: int, *widths: int) -> bool:
    return all(width * itemsize % _ALIGNMENT == 0 for width in widths)


def _groups(num_rows: int, ends: Tensor) -> Tensor:
    """Return the group of each row, int64 [m]."""
    return torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)


def _runs_of_groups(ends: Tensor, num_elements: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield groups that have rows, as many at a time as a tile may hold: their rows, their numbers,
    and the ends of each one's rows among those.
    """
    bounds = [0, *ends.tolist()]
    busy = [group for group in range(len(bounds) - 1) if bounds[group + 1] > bounds[group]]
    for tile in _tiles(len(busy), num_elements):
        some = busy[tile]
        rows = slice(bounds[some[0]], bounds[some[-1] + 1])
        numbers = torch.tensor(some, device=ends.device)
        yield rows, numbers, ends[numbers] - rows.start


def _tiles(num_rows: int, num_elements: int) -> Iterator[slice]:
    size = max(1, _TILE_ELEMENTS // num_elements)
    return (slice(start, start + size) for start in range(0, num_rows, size))
