"""Tracing: operators run once on stand-ins for rows, and a backend records its calls. What was
recorded then runs as one call on the rows of any step, without Python between one kernel and the
next.

In steps of few rows Python takes a tenth of the time of the work, up to a fifth. Each row of a
traced step is the next of a request, or belongs to a piece of a prompt, whose rows attend one by
one or in tiles, or to a training window, whose rows come after those. Other steps, and models with
an operator that cannot be recorded, run call by call.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from coserve.kernels.attention import AttentionBatch, Segment
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.low_rank import AdapterBatch

# A backend, which is declared with this module's classes.
BackendT = TypeVar("BackendT", covariant=True)


# Maximum pairs of a row and a key of prompts for which rows attend one by one in a step that is one
# call: with more, tiles of attention save more than Python takes.
MAX_PROMPT_PAIRS = 8192
# More than a step can have.
ANY_PROMPT_PAIRS = 1 << 60


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedPiece:
    """Neighbouring rows of a step that belong to one prompt: the last of its keys."""

    first_row: int
    """Row of the step with which it begins."""
    num_rows: int
    """Number of rows."""
    num_keys: int
    """Number of keys of the prompt so far, with these rows."""

    @property
    def num_pairs(self) -> int:
        """Return the number of pairs of a row and a key that it sees."""
        # About: the rows see num_keys - num_rows + 1 to num_keys keys.
        return self.num_rows * (self.num_keys - self.num_rows // 2)


class UntraceableError(Exception):
    """A call that cannot be recorded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedWindow:
    """Neighbouring rows of a pack that is trained."""

    num_rows: int
    """Number of rows."""
    first_in_pack: int
    """The pack's row with which they begin."""
    segments: Sequence[Segment]
    """Segments of the rows, in the keys and values that the pack keeps."""
    kept: Tensor
    """Addresses, int64, of the first row's place in each tensor of `TracedCalls.kept`, in that
    order; 0: that is not kept.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """The inputs of a traced step: everything that changes from step to step."""

    inputs: Mapping[str, Tensor]
    """Rows by name, [n, width]."""
    attention: AttentionBatch
    """Segments of the rows of requests, which come first. Each row is the last of its sequence,
    unless calls take a prompt's rows together (`TracedCalls.rows_apart`).
    """
    pages: Tensor
    """Page of each of these rows in the stores of keys and values, int64."""
    offsets: Tensor
    """Place of each of these rows in its page, int64."""
    adapters: AdapterBatch | None
    """Adapters of all rows; None: no row has one."""
    pieces: Sequence[TracedPiece] = ()
    """Rows of requests that belong together."""
    windows: Sequence[TracedWindow] = ()
    """Rows after those of requests, in order."""


class TracedCalls(ABC):
    """Recorded calls. They read the weights and stores of pages that the trace was made with."""

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Return the maximum number of rows of a step; for some kinds of steps it may be less."""

    @property
    @abstractmethod
    def max_prompt_pairs(self) -> int:
        """Return the maximum number of pairs of a row and a key of prompts in a step."""

    @property
    @abstractmethod
    def rows_apart(self) -> bool:
        """Return whether they take each row of a prompt as a segment of its own."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[Hashable, int]:
        """Return the bytes of a row of everything that windows can keep, by the names that the
        trace was given.
        """

    @abstractmethod
    def fit(self, step: TracedStep) -> bool:
        """Return whether they are for such a step."""

    @abstractmethod
    def run(self, step: TracedStep) -> Tensor:
        """Run them all and return the output's rows [n, width]."""

    @abstractmethod
    def run_timed(self, step: TracedStep) -> tuple[Tensor, Mapping[str, float]]:
        """Run them all and return the output's rows, and the seconds that each kernel took in all
        by its name.
        """


class Trace(ABC, Generic[BackendT]):
    """A trace under construction. Tensors in arguments and results are stand-ins, or the rows of a
    step of which only the number is right.

    Each method, and each of the backend, raises UntraceableError for a call that it cannot record.
    """

    @property
    @abstractmethod
    def backend(self) -> BackendT:
        """Return the backend that records its calls."""

    @property
    @abstractmethod
    def attention(self) -> AttentionBatch:
        """Return the stand-in for `TracedStep.attention`."""

    @property
    @abstractmethod
    def adapters(self) -> AdapterBatch:
        """Return the stand-in for `TracedStep.adapters`."""

    def group(self, group: RankGroup) -> RankGroup:
        """Return the stand-in for a group of ranks, which records its sums."""
        if group.size > 1:
            raise UntraceableError
        return group

    @abstractmethod
    def input(self, name: str, width: int) -> Tensor:
        """Return the stand-in for rows [n, width] of `TracedStep.inputs`, in the compute dtype."""

    @abstractmethod
    def keep(self, name: Hashable, rows: Tensor) -> None:
        """Record that windows keep their rows of [n, width] by this name, those that do. A trace
        that keeps nothing is for steps without windows.
        """

    @abstractmethod
    def store(self, name: Hashable, rows: Tensor, store: Tensor) -> None:
        """Record that the rows of requests, keys or values [n, width], are written to their places
        in a store [num_pages, block_tokens, width], a real tensor. If there may be windows, these
        have kept theirs by this name.
        """
