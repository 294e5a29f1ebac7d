"""One rank's backbone, cut from a whole one in memory: what tests run, and models whose weights are drawn."""

from dataclasses import replace

from torch import Tensor

from coserve.graph.layouts import FIRST, AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.weights import DenseWeight, Weight
from coserve.models.backbone import Backbone
from coserve.models.base import HEAD
from coserve.models.weights import Weights, join_runs


def divided_backbone(whole: Backbone, group: RankGroup) -> Backbone:
    """Return what a rank of a group holds of a backbone.

    Raises:
        UnsupportedModelError: the model cannot be divided among the ranks.
    """
    rank = replace(whole, group=group)
    weights: Weights = {
        part: {name: _cut(value, rank.local.state(part, name), group.rank) for name, value in tensors.items()}
        for part, tensors in whole.weights.items()
    }
    table = weights["embed"][f"{whole.architecture.embedding_name}.weight"]
    if whole.architecture.tied and isinstance(weights["head"][HEAD], DenseWeight):
        assert isinstance(table, Tensor)
        weights["head"][HEAD] = DenseWeight(table)
    return replace(rank, weights=join_runs(weights, rank.local.graphs))


def _cut(whole: Tensor | Weight, state: AnyState, rank: int) -> Tensor | Weight:
    if isinstance(whole, Tensor):
        return piece(whole, state, rank)
    return whole.cut(state, rank) if isinstance(state, Cut) else whole


def piece(whole: Tensor, state: AnyState, rank: int) -> Tensor:
    """Return what a rank holds of a tensor in a state; the tensor itself where that is all of it."""
    if isinstance(state, Cut):
        return state.take(whole, rank)
    return whole.new_zeros(whole.shape) if state is FIRST and rank else whole
