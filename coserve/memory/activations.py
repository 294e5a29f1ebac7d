"""Where a training pass keeps its tensors: anywhere on the device, or in runs of the page pool."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from coserve.errors import BudgetError
from coserve.memory.paged_kv import PagedKv

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_ALIGNMENT = 64


class ActivationMemory(Protocol):
    """Lends groups of tensors that are needed and let go together (what one block saves)."""

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        """Uninitialised tensors of these shapes and types, by name; BudgetError, and nothing is taken, if there is no
        room.
        """
        ...

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        """The inverse, for a group as a whole; the tensors must not be used any more."""
        ...


class DeviceMemory:
    """PyTorch's own allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=kind, device=self._device) for name, (shape, kind) in shapes.items()}

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        tensors.clear()


class LentRuns:
    """Each group in one run of neighbouring pages, which were given to a pack in the order in which it takes them.

    runs: (first page, number of pages) of each group.
    """

    def __init__(self, pages: PagedKv, runs: Iterable[tuple[int, int]]) -> None:
        self._pages, self._runs = pages, iter(runs)

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        first, num_pages = next(self._runs)
        room, start, tensors = self._pages.run(first, num_pages), 0, {}
        if group_bytes(shapes) > room.shape[0]:
            raise BudgetError(f"{group_bytes(shapes)} bytes do not fit into {num_pages} pages")
        for name, (shape, kind) in shapes.items():
            num_bytes = prod(shape) * kind.itemsize
            tensors[name] = room[start : start + num_bytes].view(kind).view(shape)
            start += _aligned(num_bytes)
        return tensors

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        """The giver of the runs knows from the pack's cursor that this group's is free."""
        tensors.clear()


def group_bytes(shapes: Shapes) -> int:
    """Bytes that a group takes in the pool, with every tensor aligned."""
    return sum(_aligned(prod(shape) * kind.itemsize) for shape, kind in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
