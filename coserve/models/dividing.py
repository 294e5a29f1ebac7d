"""Division of a whole backbone in memory into those of ranks, for simulation, and as a reference
for loading.
"""

from dataclasses import replace

from torch import Tensor

from coserve.kernels.groups.base import RankGroup
from coserve.kernels.weights import DenseWeight
from coserve.models.backbone import Backbone
from coserve.models.base import HEAD
from coserve.models.shares import share
from coserve.models.weights import Weights, join_runs


def divided_backbone(whole: Backbone, group: RankGroup) -> Backbone:
    """Return a rank's share of a backbone.

    Raises:
        UnsupportedModelError: the model cannot be divided among the ranks.
    """
    rank = replace(whole, group=group)
    weights: Weights = {}
    for part, tensors in whole.weights.items():
        weights[part] = {
            name: share(value, rank.local.state(part, name), group.rank)
            for name, value in tensors.items()
        }
    table = weights["embed"][f"{whole.architecture.embedding_name}.weight"]
    # Cut one by one, table and head would be two copies of the same piece.
    if whole.architecture.tied and isinstance(weights["head"][HEAD], DenseWeight):
        assert isinstance(table, Tensor)
        weights["head"][HEAD] = DenseWeight(table)
    return replace(rank, weights=join_runs(weights, rank.local.graphs))
