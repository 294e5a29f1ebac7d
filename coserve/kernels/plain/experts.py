"""Products of groups of rows, each with a matrix of its own: `grouped_mm` of PyTorch, or, for shapes that it does not
take (rows of less than 16 bytes, or no multiple of that), row by row with the matrix of each.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

# What `grouped_mm` asks of the bytes of a row.
_ALIGNMENT = 16
# Elements of matrices that are gathered at once.
_TILE_ELEMENTS = 1 << 22


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """See `Backend.grouped_product`."""
    if _fits(x.itemsize, *weight.shape[1:]):
        return grouped_mm(x, weight.mT, offs=ends)
    y, groups = x.new_empty(x.shape[0], weight.shape[1]), _groups(x.shape[0], ends)
    for rows in _tiles(x.shape[0], weight[0].numel()):
        y[rows] = torch.bmm(weight[groups[rows]], x[rows, :, None])[..., 0]
    return y


def grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """See `Backend.grouped_weight_gradient`."""
    if _fits(x.itemsize, grad.shape[1], x.shape[1]):
        return grouped_mm(grad.mT, x, offs=ends).float()
    total = torch.zeros(ends.shape[0], grad.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    groups = _groups(x.shape[0], ends)
    for rows in _tiles(x.shape[0], total[0].numel()):
        total.index_add_(0, groups[rows], torch.bmm(grad[rows, :, None].float(), x[rows, None].float()))
    return total


def _fits(itemsize: int, *widths: int) -> bool:
    return all(width * itemsize % _ALIGNMENT == 0 for width in widths)


def _groups(num_rows: int, ends: Tensor) -> Tensor:
    """Which group each row is of, int64 [m]."""
    return torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)


def _tiles(num_rows: int, num_elements: int) -> Iterator[slice]:
    size = max(1, _TILE_ELEMENTS // num_elements)
    return (slice(start, start + size) for start in range(0, num_rows, size))
