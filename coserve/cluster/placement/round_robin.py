"""Placement of each task on the next node, whatever it is: LeMix's baseline Mix-RR, or NaiveMix
(sections III and VI-A).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.view import ClusterTask, ClusterView, NodeView, Placed


@dataclass(frozen=True, kw_only=True)
class RoundRobin(PlacementPolicy):
    """Placement on one node after the other."""

    summary: ClassVar[str] = "one node after the other, requests and training alike"

    def choose(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> Placed:
        return Placed(nodes[(view.num_requests_placed + view.num_training_placed) % len(nodes)].id)
