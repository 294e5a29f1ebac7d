"""Shares of a model's weights on the ranks of a group: all of a weight, or a piece of a cut."""

from torch import Tensor

from coserve.graph.layouts import FIRST, WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.weights import Weight
from coserve.models.base import HEAD
from coserve.models.local import LocalModel


class WeightShares:
    """One rank's share of the weights of a model, by full name."""

    def __init__(self, local: LocalModel) -> None:
        """Take the states of all weights.

        Args:
            local: What of the model runs on the rank.
        """
        self.architecture, self.rank = local.architecture, local.ranks.rank
        self._states: dict[str, AnyState] = {}
        if local.divided:
            for part in local.parts:
                for tensor in self.architecture.graphs[part].with_kind("weight"):
                    self._states[self.architecture.prefix(part) + tensor.name] = local.state(
                        part, tensor.name
                    )
        if self.architecture.tied:
            table = self.state(f"{self.architecture.embedding_name}.weight")
            assert self.state(HEAD) == table, "a table that is the head, too, is divided once"

    def state(self, name: str) -> AnyState:
        """Return how the ranks divide a weight."""
        return self._states.get(name, WHOLE)

    def of(self, name: str, whole: Tensor | Weight) -> Tensor | Weight:
        """Return the rank's share of a whole weight: a copy, or the weight itself where that is all
        of it.
        """
        return share(whole, self.state(name), self.rank)


def share(whole: Tensor | Weight, state: AnyState, rank: int) -> Tensor | Weight:
    """Return a rank's share of a weight in a state."""
    if isinstance(whole, Tensor):
        return piece(whole, state, rank)
    return whole.cut(state, rank) if isinstance(state, Cut) else whole


def piece(whole: Tensor, state: AnyState, rank: int) -> Tensor:
    """Return a rank's piece of a tensor in a state; the tensor itself where that is all of it."""
    if isinstance(state, Cut):
        return state.take(whole, rank)
    return whole.new_zeros(whole.shape) if state is FIRST and rank else whole


def owned(own: Tensor, state: AnyState, rank: int) -> Tensor | None:
    """Return a rank's piece of a tensor with each entry on one rank alone; None where rank 0 has
    all that others hold.

    Of an entry that several ranks hold, those after the first of them have a zero.
    """
    if isinstance(state, Cut):
        return state.owned(own, rank)
    return None if rank else own
