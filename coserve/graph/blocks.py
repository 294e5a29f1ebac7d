"""Row-wise work in blocks of a fixed number of rows, so that kernels see the same shapes whatever
rows are in a batch.

How a library sums up a product depends on its shape: the number of rows decides which of its loops
runs. Where a row stands among those of a block decides nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Slots = Mapping[str, Any]


def split_rows(x: Tensor, size: int) -> Sequence[Tensor]:
    """x [n, …] as contiguous blocks [size, …], the last one filled up with its last row; n is at
    least 1.
    """
    missing = -x.shape[0] % size
    x = torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) if missing else x.contiguous()
    return torch.split(x, size)


def in_blocks(
    run: Callable[[Sequence[Slots]], Sequence[Mapping[str, Tensor]]],
    inputs: Sequence[Slots],
    row_slots: Sequence[Collection[str]],
    size: int,
) -> list[dict[str, Tensor]]:
    """What `run` makes of several nodes' inputs by slot, block by block; row_slots: those that are
    [n, …].

    Returns each node's outputs [n, …] by slot, contiguous.
    """
    tensors = {
        id(given[slot]): given[slot]
        for given, slots in zip(inputs, row_slots, strict=True)
        for slot in slots
    }
    num_rows = next(iter(tensors.values())).shape[0]
    blocks = {key: split_rows(x, size) for key, x in tensors.items()}
    made = [
        run(
            [
                {
                    slot: blocks[id(value)][index] if slot in slots else value
                    for slot, value in given.items()
                }
                for given, slots in zip(inputs, row_slots, strict=True)
            ]
        )
        for index in range(-(-num_rows // size))
    ]
    return [
        {slot: torch.cat([x[slot] for x in each])[:num_rows] for slot in each[0]}
        for each in zip(*made, strict=True)
    ]
