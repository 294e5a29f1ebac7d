"""Numbers that a step computes on the device, read together at its end: one copy, one wait."""

import torch
from torch import Tensor

from coserve.devices.torch.process_memory import memory_errors
from coserve.errors import DeviceMemoryError


class Readout:
    """Collector of tensors; `read` copies all their values to the host at once.

    They are copied as float64, which holds float32 and whole numbers up to 2^53 exactly.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._values: list[float] = []
        self._num_values = 0

    def add(self, tensor: Tensor) -> "Pending":
        """Add a tensor of numbers, of any shape."""
        start, self._num_values = self._num_values, self._num_values + tensor.numel()
        if tensor.numel():
            self._parts.append(tensor.reshape(-1).to(torch.float64))
        return Pending(self, start, self._num_values)

    def read(self) -> None:
        """Wait for the device; after it, every `Pending` has its values."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        try:
            with memory_errors():
                self._values = torch.cat(parts).tolist()
        except DeviceMemoryError:  # one after the other they need no memory on the device
            self._values = [value for part in parts for value in part.tolist()]

    def values(self, start: int, end: int) -> list[float]:
        """Return some of the numbers that were read."""
        return self._values[start:end]


class Pending:
    """Values of one tensor, in row-major order, once they have been read."""

    def __init__(self, readout: Readout, start: int, end: int) -> None:
        self._readout, self._start, self._end = readout, start, end

    def floats(self) -> list[float]:
        return self._readout.values(self._start, self._end)

    def ints(self) -> list[int]:
        return [int(value) for value in self.floats()]
