"""Sums of gradients, of many parameters at once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coserve.memory.tensors.activations import part_of

_ALIGNMENT_BYTES = 64


def zeros_like_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros of the shapes, of one dtype and device, by the same names. They lie in one piece
    of memory, which is cleared at once: a job has hundreds.
    """
    if not tensors:
        return {}
    first, size, starts = next(iter(tensors.values())), 0, []
    unit = _ALIGNMENT_BYTES // first.dtype.itemsize
    for tensor in tensors.values():
        starts.append(size)
        size += -(-tensor.numel() // unit) * unit
    whole = torch.zeros(size, dtype=first.dtype, device=first.device)
    return {
        name: part_of(whole, tensor.shape, start)
        for (name, tensor), start in zip(tensors.items(), starts, strict=True)
    }
