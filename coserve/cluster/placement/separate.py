"""Placement with nodes for requests and nodes for training, for good: LeMix's baseline Separate
(section VI-A).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import ClassVar

from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.view import ClusterTask, ClusterView, Decision, NodeView, Placed, Waits
from coserve.settings import setting

_RETRY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Separate(PlacementPolicy):
    """Placement on separate nodes. The last ⌊N·α + 0.5⌋ of N nodes train, one at least and all but
    one at most; on each side, tasks go to one node after the other.
    """

    summary: ClassVar[str] = "a fixed share of the nodes for training, the others for requests"

    training_share: float = setting(0.5, "α: share of the nodes that train.", most=1.0)

    def choose(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> Decision:
        num_training = self.num_training(view)
        # Of all nodes, so that one that drains changes nobody's side.
        train = {node.id for node in view.nodes[len(view.nodes) - num_training :]}
        side = [node for node in nodes if (node.id in train) == task.trains or len(view.nodes) == 1]
        if not side and task.excluded.issuperset({node.id for node in view.nodes} - train):
            side = list(nodes)  # an adapter that only its job has, on a node that trains
        if not side:
            return Waits(
                f"no node of those for {'training' if task.trains else 'requests'} can take it",
                _RETRY_S,
            )
        turn = view.num_training_placed if task.trains else view.num_requests_placed
        return Placed(side[turn % len(side)].id)

    def num_training(self, view: ClusterView) -> int:
        """Return the number of nodes that train."""
        return split(len(view.nodes), self.training_share)


def split(num_nodes: int, training_share: float) -> int:
    """Return how many of these nodes train."""
    return max(1, min(num_nodes - 1, floor(num_nodes * training_share + 0.5)))
