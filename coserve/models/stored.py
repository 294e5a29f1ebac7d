"""Layout of a weight in a checkpoint: the names of its tensors, and their places in the weight.

A layout is a set of views of a weight: for each tensor of the checkpoint, a view that has the
tensor's shape. Loading copies into the views, saving copies out of them, so that both agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from coserve.kernels.cuts import Cut

# Part of a tensor: a number or a slice for each of its first dimensions; () is all of it.
Index: TypeAlias = tuple[int | slice, ...]

_ALL: int | slice = slice(None)


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """Place of one of a checkpoint's tensors in a weight."""

    at: Index = ()
    """Index into the weight; () for all of it."""
    is_transposed: bool = False
    """Whether the tensor has the last two dimensions of the weight swapped."""

    def view(self, weight: Tensor) -> Tensor:
        """Return the tensor as a view of the weight."""
        found = weight[self.at] if self.at else weight
        return found.mT if self.is_transposed else found

    def of_rank(
        self, shape: tuple[int, ...], cut: Cut, rank: int
    ) -> list[tuple[Index, "TensorPlace"]]:
        """Return which parts of the tensor a rank needs, with their places in the rank's piece of
        the weight.

        Args:
            shape: Shape of the whole weight.
            cut: How ranks divide the weight.
            rank: Number of the rank.
        """
        given: list[int | slice] = [*self.at, *[_ALL] * (len(shape) - len(self.at))]
        dim = len(shape) + cut.dim
        own = given[dim]
        first, stop = (own, own + 1) if isinstance(own, int) else own.indices(shape[dim])[:2]
        found, start = list[tuple[Index, TensorPlace]](), 0
        for run in cut.runs[rank]:
            low, high = max(run.start, first), min(run.stop, stop)
            if low < high:
                local = start + low - run.start
                target = [*given]
                target[dim] = local if isinstance(own, int) else slice(local, local + high - low)
                needed = [
                    _ALL if number != dim else slice(low - first, high - first)
                    for number in range(len(shape))
                ]
                # Dimensions of which the tensor has one entry are none of its own.
                needed = [
                    part for part, of in zip(needed, given, strict=True) if not isinstance(of, int)
                ]
                if self.is_transposed:
                    needed[-2:] = reversed(needed[-2:])
                found.append(
                    (tuple(needed), TensorPlace(at=tuple(target), is_transposed=self.is_transposed))
                )
            start += run.stop - run.start
        return found


# Pieces of a tensor that are needed, and the place of each in the result.
Pieces: TypeAlias = Sequence[tuple[Index, TensorPlace]]
WHOLE_TENSOR: Pieces = (((), TensorPlace()),)


class Stored(ABC):
    """Names of a checkpoint's tensors, and their places in the weight."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors, in the order of `places`."""

    @abstractmethod
    def places(self, shape: tuple[int, ...]) -> Sequence[TensorPlace]:
        """Return the place of each of the tensors in a weight of this shape."""

    def views(self, weight: Tensor) -> list[Tensor]:
        """Return the checkpoint's tensors as views of the weight."""
        return [place.view(weight) for place in self.places(tuple(weight.shape))]


@dataclass(frozen=True)
class AsItIs(Stored):
    """One tensor that is the weight, maybe under another name."""

    name: str
    """Name of the tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def places(self, shape: tuple[int, ...]) -> Sequence[TensorPlace]:
        return (TensorPlace(),)


@dataclass(frozen=True)
class Transposed(AsItIs):
    """One tensor [..., in, out], as transformers' Conv1D has it; the weight is [..., out, in]."""

    def places(self, shape: tuple[int, ...]) -> Sequence[TensorPlace]:
        return (TensorPlace(is_transposed=True),)


@dataclass(frozen=True)
class PerExpert(Stored):
    """A tensor [out, in] for each expert, or several, row after row; the weight is [experts, sum of
    out, in].
    """

    patterns: tuple[str, ...]
    """Names of the tensors, with {} for the expert's number; all have equally many rows."""
    num_experts: int
    """Number of experts."""
    whole: str | None = None
    """Name of the weight in files that have it as one tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(
            pattern.format(e) for e in range(self.num_experts) for pattern in self.patterns
        )

    def places(self, shape: tuple[int, ...]) -> Sequence[TensorPlace]:
        rows = shape[-2] // len(self.patterns)
        return [
            TensorPlace(at=(expert, slice(number * rows, (number + 1) * rows)))
            for expert in range(self.num_experts)
            for number in range(len(self.patterns))
        ]
