"""How a checkpoint holds a weight of a graph: under which names, and how those tensors lie in the weight.

A layout is a way to look at a weight: for each tensor of the checkpoint, a view of the weight that has the tensor's
shape. Loading copies into the views, saving copies out of them, so that both agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class Stored(ABC):
    """Names of a checkpoint's tensors, and where they are in the weight."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in the order of `views`."""

    @abstractmethod
    def views(self, weight: Tensor) -> Sequence[Tensor]:
        """The weight as the checkpoint's tensors: views of it."""


@dataclass(frozen=True)
class AsItIs(Stored):
    """One tensor that is the weight, maybe of another name."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def views(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight,)


@dataclass(frozen=True)
class Transposed(AsItIs):
    """One tensor [..., in, out], as transformers' Conv1D has it; the weight is [..., out, in]."""

    def views(self, weight: Tensor) -> tuple[Tensor, ...]:
        return (weight.mT,)


@dataclass(frozen=True)
class PerExpert(Stored):
    """A tensor [out, in] for each expert, or several, row after row; the weight is [experts, sum of out, in].

    patterns: their names, with {} where the expert's number stands; all have as many rows. whole: what files call the
    weight that have it as one tensor.
    """

    patterns: tuple[str, ...]
    num_experts: int
    whole: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(pattern.format(e) for e in range(self.num_experts) for pattern in self.patterns)

    def views(self, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for expert in weight.unbind() for part in expert.chunk(len(self.patterns)))
