"""Memory for the tensors of a training pass: PyTorch's own, or runs of the page pool."""

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
    """Memory that lends groups of tensors, each group as a whole (what one block saves)."""

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        """Return uninitialised tensors of these shapes and types, by name.

        Raises:
            BudgetError: There is no room; nothing is taken.
        """
        ...

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        """Free a group as a whole; its tensors must not be used any more."""
        ...


class DeviceMemory:
    """Memory of PyTorch's allocator."""

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
    """Memory in runs of neighbouring pages, one for each group, in a pack's order."""

    def __init__(self, pages: PagedKv, runs: Iterable[tuple[int, int]]) -> None:
        """Use runs that the engine has taken for the pack.

        Args:
            pages: The page pool.
            runs: First page and number of pages of each group.
        """
        self._pages, self._runs = pages, iter(runs)

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        first, num_pages = next(self._runs)
        room, start, starts = self._pages.run(first, num_pages), 0, []
        for shape, kind in shapes.values():
            starts.append(start)
            start += _aligned(prod(shape) * kind.itemsize)
        if start > room.shape[0]:
            raise BudgetError(f"{start} bytes do not fit into {num_pages} pages")
        # One view of the run for each dtype, out of which the tensors are cut.
        rooms = {kind: room.view(kind) for kind in {kind for _, kind in shapes.values()}}
        return {
            name: part_of(rooms[kind], shape, start // kind.itemsize)
            for (name, (shape, kind)), start in zip(shapes.items(), starts, strict=True)
        }

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        """Forget the tensors; the engine knows from the pack's progress that the run is free."""
        tensors.clear()


def part_of(whole: Tensor, shape: Sequence[int], start: int) -> Tensor:
    """Return a part of a one-dimensional tensor, from an element on, in a shape.

    One operation, since a pack has hundreds of tensors.
    """
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return whole.as_strided(shape, strides[::-1], whole.storage_offset() + start)


def group_bytes(shapes: Shapes) -> int:
    """Return the bytes that a group takes in the pool, with every tensor aligned."""
    return sum(_aligned(prod(shape) * kind.itemsize) for shape, kind in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
