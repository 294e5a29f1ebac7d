"""Stand-ins that operators get while they are traced, for rows and numbers of a step; and the
step's memory.

Rows that a step computes lie in memory of its own, in which each tensor has its place: a number of
bytes for each row of the step, reused by others once nothing reads it. A stand-in has the place
where its rows will lie, and refuses everything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from coserve.kernels.trace import UntraceableError

# An argument of a call: its kind, and two numbers (see `calls.cpp`).
Argument = tuple[int, int, int]
CONSTANT, STEP, ROWS = range(3)
# Numbers of every step, by their place; inputs come after them.
STEP_NUMBERS = (
    *(
        "num_rows",
        "memory",
        "num_threads",
        "num_paged_rows",
        "pages",
        "offsets",
        "table",
        "first_page",
        "lengths",
    ),
    *("pieces", "num_pieces", "windows", "num_windows"),
    *("adapter_rows", "adapter_ends", "num_adapters", "num_places", "adapter_addresses"),
    "few_rows",
)
# Alignment of a step's memory: a cache line.
ALIGNMENT = 64


@dataclass(frozen=True)
class StepNumber:
    """A number of the step, plus a constant."""

    place: int
    """Its place in `STEP_NUMBERS`."""
    more: int
    """The constant that is added."""


def step(name: str, more: int = 0) -> StepNumber:
    """Return a number of the step by its name, plus a constant."""
    return StepNumber(STEP_NUMBERS.index(name), more)


class MemorySlot:
    """The place of a tensor's rows in the step's memory, taken when it is first asked for and given
    back when nothing reads the rows any more.

    Args:
        memory: the step's memory.
        num_bytes: bytes of each row.
    """

    def __init__(self, memory: "RowMemory", num_bytes: int) -> None:
        self._memory, self.row_bytes = memory, num_bytes
        self._num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._start: int | None = None

    @property
    def start(self) -> int:
        if self._start is None:
            self._start = self._memory.take(self._num_bytes)
        return self._start

    def __del__(self) -> None:
        if self._start is not None:
            self._memory.give_back(self._start, self._num_bytes)


class RowMemory:
    """The free bytes of a step's memory, for each row."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: list[
            tuple[int, int]
        ] = []  # (start, number of bytes), in order, no two neighbours

    def take(self, num_bytes: int) -> int:
        """Take the first room that is large enough, and return where it starts."""
        for index, (start, size) in enumerate(self._free):
            if size >= num_bytes:
                self._free[index : index + 1] = (
                    [(start + num_bytes, size - num_bytes)] if size > num_bytes else []
                )
                return start
        start = self.num_bytes
        self.num_bytes += num_bytes
        return start

    def give_back(self, start: int, num_bytes: int) -> None:
        """Free bytes that were taken."""
        joined: list[tuple[int, int]] = []
        for first, size in sorted([*self._free, (start, num_bytes)]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((first, size))
        self._free = joined


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UntraceableError


class RowsTrace(Protocol):
    """The part of a trace that stand-ins for rows use."""

    dtype: torch.dtype
    """The compute dtype."""

    def add(self, one: object, other: object) -> "TracedRows":
        """Return the sum of rows of equal width."""


class TracedRows:
    """A stand-in for rows [n, width], or [n, heads, width of a head]: columns of a place, or of an
    input.

    Args:
        trace: the trace.
        source: a place, or an input by its number of the step.
        width: number of columns.
        step: elements from one row to the next.
        first: first column.
        heads: number of heads.
    """

    def __init__(
        self,
        trace: RowsTrace,
        source: MemorySlot | int,
        *,
        width: int,
        step: int,
        first: int = 0,
        heads: int = 1,
    ) -> None:
        self._trace, self.source = trace, source
        self.width, self.step, self.first, self.heads = width, step, first, heads

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row, without those between it and the next."""
        return self.width * self._trace.dtype.itemsize

    @property
    def argument(self) -> Argument:
        """Return its address as an argument."""
        offset = self.first * self._trace.dtype.itemsize
        if isinstance(self.source, MemorySlot):
            return ROWS, self.source.start, offset
        return STEP, self.source, offset

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape, with -1 for the number of rows."""
        return (-1, self.width) if self.heads == 1 else (-1, self.heads, self.width // self.heads)

    @property
    def dtype(self) -> torch.dtype:
        return self._trace.dtype

    def view(self, num_rows: int, heads: int, width: int) -> "TracedRows":
        if num_rows != -1 or width != -1 or self.width % heads:
            raise UntraceableError
        return self._columns(self.first, self.width, heads)

    def flatten(self, start: int) -> "TracedRows":
        if start != 1:
            raise UntraceableError
        return self._columns(self.first, self.width)

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> "list[TracedRows]":
        if dim != -1 or sum(sizes) != self.width:
            raise UntraceableError
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [
            self._columns(self.first + end - size, size)
            for end, size in zip(ends, sizes, strict=True)
        ]

    def _columns(self, first: int, width: int, heads: int = 1) -> "TracedRows":
        return TracedRows(
            self._trace, self.source, width=width, step=self.step, first=first, heads=heads
        )

    def __getitem__(self, rows: object) -> "TracedRows":
        if rows != slice(None):
            raise UntraceableError
        return self

    def __add__(self, other: object) -> "TracedRows":
        return self._trace.add(self, other)

    def __getattr__(self, name: str) -> NoReturn:
        raise UntraceableError

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> NoReturn:
        raise UntraceableError

    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __radd__ = __neg__ = (
        __pow__
    ) = _refuse
    __matmul__ = __rmatmul__ = __setitem__ = __iadd__ = __imul__ = __len__ = __iter__ = __bool__ = (
        _refuse
    )
