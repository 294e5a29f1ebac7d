"""Placement with nodes for requests and nodes for training, by the rate of requests: LeMix's
Separate (dynamic) (section II-B).
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.cluster.placement.separate import Separate, split
from coserve.cluster.view import ClusterView
from coserve.settings import setting


@dataclass(frozen=True, kw_only=True)
class SeparateDynamic(Separate):
    """Placement on separate nodes. The paper's four nodes are split 1-3 below 50 requests per
    second, and 2-2 from there on.
    """

    summary: ClassVar[str] = "as separate, with more nodes for training while few requests come"

    busy_rate: float = setting(50.0, "Requests per second from which training_share applies.")
    quiet_training_share: float = setting(
        0.75, "Share of the nodes that train below that rate.", most=1.0
    )

    def num_training(self, view: ClusterView) -> int:
        share = (
            self.training_share
            if view.request_rate >= self.busy_rate
            else self.quiet_training_share
        )
        return split(len(view.nodes), share)
