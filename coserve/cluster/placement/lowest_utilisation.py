"""Placement of each task on the node that was least busy lately: LeMix's baseline Mix-LUF (section
VI-A).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.view import ClusterTask, ClusterView, NodeView, Placed


@dataclass(frozen=True, kw_only=True)
class LowestUtilisation(PlacementPolicy):
    """Placement by utilisation; of nodes that were busy alike, on the one with the fewest tasks."""

    summary: ClassVar[str] = "the node that has been busy least of late"

    def choose(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> Placed:
        return Placed(min(nodes, key=lambda node: (node.utilisation, node.num_tasks)).id)
