"""Where a training pass keeps its tensors: anywhere on the device, or in runs of the page pool."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from coserve.errors import BudgetError
from coserve.memory.pages import PagePool

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

OWNER = "activations"
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


class PooledMemory:
    """Each group in one run of neighbouring pages.

    evict: asked for pages when there is no run; gives some back to the pool, and returns how many (0: there are no
    more).
    """

    def __init__(self, pool: PagePool, evict: Callable[[int], int] | None = None) -> None:
        self._pool, self._evict = pool, evict or (lambda _: 0)
        self._runs: dict[int, tuple[dict[str, Tensor], range]] = {}

    def num_pages(self, num_bytes: int) -> int:
        """Pages of a run of so many bytes."""
        return -(-num_bytes // self._pool.page_bytes)

    def take_run(self, num_bytes: int) -> range:
        """The pages alone, for whoever has no tensors; BudgetError takes nothing. `give_back_run` is the inverse."""
        num_pages = self.num_pages(num_bytes)
        run = self._pool.take_run(OWNER, num_pages)
        while run is None and self._evict(num_pages):
            run = self._pool.take_run(OWNER, num_pages)
        if run is None:
            raise BudgetError(
                f"{num_pages} neighbouring pages asked for; {self._pool.num_free} are free, "
                f"{self._pool.longest_free_run()} of them side by side"
            )
        return run

    def give_back_run(self, run: range) -> None:
        self._pool.give_back(OWNER, run)

    def take(self, shapes: Shapes) -> dict[str, Tensor]:
        run = self.take_run(group_bytes(shapes))
        room, start, tensors = self._pool.storage[run.start : run.stop].flatten(), 0, {}
        for name, (shape, kind) in shapes.items():
            num_bytes = prod(shape) * kind.itemsize
            tensors[name] = room[start : start + num_bytes].view(kind).view(shape)
            start += _aligned(num_bytes)
        self._runs[id(tensors)] = tensors, run
        return tensors

    def give_back(self, tensors: dict[str, Tensor]) -> None:
        if id(tensors) in self._runs:
            self.give_back_run(self._runs.pop(id(tensors))[1])
        tensors.clear()


def group_bytes(shapes: Shapes) -> int:
    """Bytes that a group takes in the pool, with every tensor aligned."""
    return sum(_aligned(prod(shape) * kind.itemsize) for shape, kind in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
