"""Where a training pass keeps its tensors: anywhere on the device, or in runs of the page pool."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from coserve.errors import BudgetError
from coserve.memory.tensors.paged_kv import PagedKv

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_ALIGNMENT = 64


class ActivationMemory(Protocol):
    """Lends groups of tensors that are needed and let go together (what one block saves)."""

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        """Uninitialised tensors of these shapes and types, by name; BudgetError, and nothing is
        taken, if there is no room.
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
        return {
            name: torch.empty(shape, dtype=kind, device=self._device)
            for name, (shape, kind) in shapes.items()
        }

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        tensors.clear()


class LentRuns:
    """Each group in one run of neighbouring pages, which were given to a pack in the order in which
    it takes them.

    runs: (first page, number of pages) of each group.
    """

    def __init__(self, pages: PagedKv, runs: Iterable[tuple[int, int]]) -> None:
        self._pages, self._runs = pages, iter(runs)

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        first, num_pages = next(self._runs)
        room, start, starts = self._pages.run(first, num_pages), 0, []
        for shape, kind in shapes.values():
            starts.append(start)
            start += _aligned(prod(shape) * kind.itemsize)
        if start > room.shape[0]:
            raise BudgetError(f"{start} bytes do not fit into {num_pages} pages")
        rooms = {kind: room.view(kind) for kind in {kind for _, kind in shapes.values()}}
        return {
            name: part_of(rooms[kind], shape, start // kind.itemsize)
            for (name, (shape, kind)), start in zip(shapes.items(), starts, strict=True)
        }

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        """The giver of the runs knows from the pack's cursor that this group's is free."""
        tensors.clear()


def part_of(whole: Tensor, shape: Sequence[int], start: int) -> Tensor:
    """The numbers from a place of a one-dimensional tensor on, in a shape: by one operation, since
    a pack has hundreds of tensors.
    """
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return whole.as_strided(shape, strides[::-1], whole.storage_offset() + start)


def group_bytes(shapes: Shapes) -> int:
    """Bytes that a group takes in the pool, with every tensor aligned."""
    return sum(_aligned(prod(shape) * kind.itemsize) for shape, kind in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
