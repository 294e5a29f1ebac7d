"""Row-wise work in blocks of a fixed number of rows, so that kernels see the same shapes whatever
rows are in a batch.

How a library sums up a product depends on its shape: the number of rows decides which of its loops
runs. The place of a row among those of a block decides nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Slots = Mapping[str, Any]


def split_rows(x: Tensor, size: int) -> Sequence[Tensor]:
    """Split x [n, …] into contiguous blocks [size, …], the last of which is filled up with x's last
    row; n is at least 1.
    """
    missing = -x.shape[0] % size
    # Copies of a real row and not zeros: any kernel can run on them, and none divides by zero.
    x = torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) if missing else x.contiguous()
    return torch.split(x, size)


def in_blocks(
    run: Callable[[Sequence[Slots]], Sequence[Mapping[str, Tensor]]],
    inputs: Sequence[Slots],
    row_slots: Sequence[Collection[str]],
    size: int,
) -> list[dict[str, Tensor]]:
    """Run several nodes block by block, and return each node's outputs [n, …] by slot, contiguous.

    Args:
        run: computes the nodes' outputs from their inputs.
        inputs: each node's inputs by slot.
        row_slots: each node's inputs that have rows, [n, …].
        size: rows of a block.
    """
    # By identity, so that a tensor that several nodes read is cut only once.
    tensors = {
        id(given[slot]): given[slot]
        for given, slots in zip(inputs, row_slots, strict=True)
        for slot in slots
    }
    num_rows = next(iter(tensors.values())).shape[0]
    blocks = {key: split_rows(x, size) for key, x in tensors.items()}
    results = [
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
        for each in zip(*results, strict=True)
    ]
