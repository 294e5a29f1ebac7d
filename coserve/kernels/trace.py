"""Tracing: operators run once on stand-ins for rows, and a backend writes down what it is asked
for. What was written down then runs as one call on the rows of any step, without Python between one
kernel and the next.

In steps of few rows Python takes as long as a tenth of the work, up to a fifth. Each row is the
next of a request, or of a piece of a prompt, whose rows attend one by one or in tiles; or it
belongs to a training window, whose rows come after those. A step whose rows are not so, and a model
of which some operator cannot be written down, run as always.
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


# Up to how many pairs of a row and a key of prompts rows attend one by one in a step that is one
# call: with more, tiles of attention save more than Python takes.
MOST_PROMPT_PAIRS = 8192
# More than a step can have.
ANY_PROMPT_PAIRS = 1 << 60


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedPiece:
    """Neighbouring rows of a step that belong to one prompt: the last of its keys."""

    first_row: int
    num_rows: int
    num_keys: int

    @property
    def num_pairs(self) -> int:
        """Of a row and a key that it sees."""
        return self.num_rows * (self.num_keys - self.num_rows // 2)


class UntraceableError(Exception):
    """What was asked for cannot be written down."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedWindow:
    """Neighbouring rows of a pack that is trained.

    first_in_pack: the pack's row with which they begin. segments: whom they attend to, of the keys
    and values that the pack keeps. kept: where they go, addresses int64: of the first one's place
    in each tensor of `TracedCalls.kept`, in that order; 0: it is not kept.
    """

    num_rows: int
    first_in_pack: int
    segments: Sequence[Segment]
    kept: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """What changes from step to step.

    inputs: rows by name, [n, width]. attention: of the rows of requests, which come first, each the
    last of its sequence, unless calls take a prompt's rows together (`TracedCalls.rows_apart`);
    pieces: those of them that belong together. pages, offsets: where in the stores of keys and
    values each of them has its own, int64. adapters: of all rows, or None. windows: the rows after
    those of requests, in order.
    """

    inputs: Mapping[str, Tensor]
    attention: AttentionBatch
    pages: Tensor
    offsets: Tensor
    adapters: AdapterBatch | None
    pieces: Sequence[TracedPiece] = ()
    windows: Sequence[TracedWindow] = ()


class TracedCalls(ABC):
    """Calls that were written down. They read the weights and stores of pages that the trace was
    made with.
    """

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """For how many rows of a step they are, at most; there may be kinds of steps for which it
        is less.
        """

    @property
    @abstractmethod
    def most_prompt_pairs(self) -> int:
        """For how many pairs of a row and a key of prompts in a step they are, at most."""

    @property
    @abstractmethod
    def rows_apart(self) -> bool:
        """Whether they take each row of a prompt as a segment of its own."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[Hashable, int]:
        """What windows can keep, by the names that the trace was given: bytes of a row."""

    @abstractmethod
    def fit(self, step: TracedStep) -> bool:
        """Whether they are for such a step."""

    @abstractmethod
    def run(self, step: TracedStep) -> Tensor:
        """Run them all: the output's rows [n, width]."""

    @abstractmethod
    def run_timed(self, step: TracedStep) -> tuple[Tensor, Mapping[str, float]]:
        """The same, with what each kernel took in all, in seconds by its name."""


class Trace(ABC, Generic[BackendT]):
    """One trace that is being made. Where tensors stand in arguments and results, these are
    stand-ins, or the rows of a step of which nothing but the number is right.

    Each method, and each of the backend, raises UntraceableError for what it cannot write down.
    """

    @property
    @abstractmethod
    def backend(self) -> BackendT:
        """Writes down what it is asked for."""

    @property
    @abstractmethod
    def attention(self) -> AttentionBatch:
        """Stands for `TracedStep.attention`."""

    @property
    @abstractmethod
    def adapters(self) -> AdapterBatch:
        """Stands for `TracedStep.adapters`."""

    def group(self, group: RankGroup) -> RankGroup:
        """Stands for a group of ranks: writes down its sums."""
        if group.size > 1:
            raise UntraceableError
        return group

    @abstractmethod
    def input(self, name: str, width: int) -> Tensor:
        """Stands for rows [n, width] of `TracedStep.inputs`, in the compute dtype."""

    @abstractmethod
    def keep(self, name: Hashable, rows: Tensor) -> None:
        """Of rows [n, width], windows keep theirs by this name, those that do. A trace that keeps
        nothing is for steps without windows.
        """

    @abstractmethod
    def store(self, name: Hashable, rows: Tensor, store: Tensor) -> None:
        """Of rows [n, width], keys or values, requests' go to their places in a store [num_pages,
        block_tokens, width], a real tensor. Windows have kept theirs by this name, if there may be
        any.
        """
