"""A group of ranks while a trace is made: its sums are recorded, and everything else is refused."""

from typing import Protocol, cast

from torch import Tensor

from coserve.kernels.cpu.stand_ins import TracedRows, step
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.trace import UntraceableError


class CallsTrace(Protocol):
    """The part of a trace that the group uses."""

    @property
    def is_bfloat16(self) -> bool:
        """Return whether rows are bfloat16; they are float32 otherwise."""

    def new(self, width: int, *, heads: int = 1) -> TracedRows:
        """Return room for rows."""

    def rows(self, value: object) -> TracedRows:
        """Return a value that is a stand-in for rows of this trace; refuse any other."""

    def call(self, name: str, *arguments: object) -> None:
        """Record one call."""


class TracedGroup(RankGroup):
    """A stand-in for a group of several ranks."""

    def __init__(self, trace: CallsTrace, group: RankGroup) -> None:
        super().__init__(rank=group.rank, size=group.size)
        self._trace, self._group = trace, group

    def sum(self, x: Tensor, name: str = "") -> Tensor:
        trace, rows, found = self._trace, self._trace.rows(x), self._group.compiled_sum(name)
        # Rows with gaps would be copied first.
        if found is None or rows.step != rows.width:
            raise UntraceableError
        (address, digest), y = found, trace.new(rows.width)
        trace.call(
            "rank_sum", address, rows, y, step("num_rows"), rows.width, trace.is_bfloat16, digest
        )
        return cast(Tensor, y)

    def sum_(self, x: Tensor, name: str = "") -> Tensor:
        raise UntraceableError

    def fail(self, reason: str) -> None:
        raise UntraceableError

    def reset(self) -> None:
        raise UntraceableError

    def all_gather(self, x: Tensor, name: str = "") -> Tensor:
        raise UntraceableError

    def gather(self, x: Tensor, to: int = 0, name: str = "") -> Tensor | None:
        raise UntraceableError

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        raise UntraceableError

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        raise UntraceableError

    def _agree(self, number: int) -> int:
        raise UntraceableError
