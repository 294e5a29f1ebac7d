"""LeMix: the node with the best of idleness, length consistency and response time (arXiv
2507.21276, section IV).

Execution planning (algorithm 1) says what a task would do to each node: the idleness that it adds,
II, and its response time, R. The node's score is (IP + λ2·LC) / R^λ1, with the idleness profit IP =
-min(II/S - (a - a₋₁), τ) and LC the normal density of the task's length among the lengths that the
node has run. A training task waits while requests would miss their SLO for it (equation 4). A task
waits for memory below κ of a node's, for T_max at most; then a node offloads caches for it
(algorithm 2). Few nodes are used where few suffice: an idle node has idle time to lose, and a used
one has lengths to match (section IV-C, figure 9).

Where this differs from the page:

- Equation 1 has max in place of min. Then what an idle node loses by a task has no bound, so that
  the longer it has been idle the less it gets; and a larger τ would spread tasks out, where section
  VI-G says that it consolidates.
- Equation 3 has λ1·R, which scales the scores of all nodes alike and so decides nothing; as an
  exponent λ1 does what section VI-G says of it.
- λ1 is large enough that a node which lengths do not fit still gets tasks where others have long
  queues; with 1, the node for long tasks ended last, by half of a run in overload.
- Where the numerator is below 0 it is multiplied by R^λ1, so that a longer response stays the worse
  one.
- Where no request waits but some came of late, one that comes now, as long as tasks here are in the
  mean, stands for the next (equation 4).
- The page says nothing on nodes that have run nothing: their LC is that of a deviation as large as
  the length.
- On real nodes, whose training gives way to requests, algorithm 1 plans requests alone. A job is
  planned as a single optimizer step, however many it has, which begins at once, takes longer the
  less slack and the more jobs there are, adds no idleness and delays no request. So its node is
  chosen by R and LC, and it waits by equation 4 only where requests would miss their SLO without
  it, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, pi, sqrt
from typing import ClassVar

from coserve.cluster.paths import ExecutionPath, plan_path
from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.queues import RequestsFirst, TaskQueue
from coserve.cluster.view import ClusterTask, ClusterView, Decision, NodeView, Placed, Waits
from coserve.settings import setting

# Seconds after which memory and deferred training are looked at again, if nothing ends before (Δt
# of algorithm 2).
_CHECK_S = 0.02
# Least deviation, as a share of the mean length: the density of a node that has run one length
# alone would be unbounded.
_MIN_DEVIATION = 0.1


@dataclass(frozen=True, kw_only=True)
class Lemix(PlacementPolicy):
    """LeMix's placement, as the module describes it."""

    summary: ClassVar[str] = (
        "least added idleness, lengths that fit and soonest response, as in LeMix"
    )

    response_weight: float = setting(5.0, "λ1: how much the response time counts.")
    length_weight: float = setting(100.0, "λ2: how much the consistency of lengths counts.")
    idleness_bound_s: float = setting(0.1, "τ: added idleness beyond this does not count.")
    slo_times: float = setting(
        5.0, "τ_R: the SLO of requests without one, in forward passes of their own.", least=1
    )
    max_defer_s: float = setting(
        60.0, "Seconds after which a training task is placed whatever it delays."
    )

    def queue(self) -> TaskQueue:
        """Return a queue of requests before training (queue-level priorities): what a training task
        delays is known when it is placed.
        """
        return RequestsFirst()

    def choose(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> Decision:
        waited_s = view.now_s - task.arrival_s
        fitting = [node for node in nodes if node.has_memory(task)]
        if not fitting and waited_s < min([node.profile.longest_wait_s for node in nodes]):
            return Waits("no node has memory for it", _CHECK_S)
        planned = [(node, self.plan(view, task, node)) for node in fitting or nodes]
        node, path = max(planned, key=lambda pair: self.score(view, task, pair[0], pair[1]))
        if (
            task.trains
            and waited_s < self.max_defer_s
            and self.delays(view, task, path, node, nodes)
        ):
            return Waits("requests would miss their SLO", _CHECK_S)
        return Placed(node.id, path.task, offloads=not fitting)

    def plan(self, view: ClusterView, task: ClusterTask, node: NodeView) -> ExecutionPath:
        """Return a task's path on a node."""
        return plan_path(node, task, view.now_s)

    def score(
        self, view: ClusterView, task: ClusterTask, node: NodeView, path: ExecutionPath
    ) -> float:
        """Return a node's score: equation 3, in this module's form."""
        since_s = 0.0 if view.last_arrival_s is None else task.arrival_s - view.last_arrival_s
        profit = -min(path.idleness_s / node.num_stages - since_s, self.idleness_bound_s)
        value = profit + self.length_weight * length_consistency(node, task.num_tokens)
        weighed: float = max(path.response_s, 1e-9) ** self.response_weight
        return value / weighed if value > 0 else value * weighed

    def delays(
        self,
        view: ClusterView,
        task: ClusterTask,
        path: ExecutionPath,
        chosen: NodeView,
        nodes: Sequence[NodeView],
    ) -> bool:
        """Return whether the next request would miss its SLO on every node if the task were placed
        (equation 4).
        """
        if not view.request_rate:
            return False
        for node in nodes:
            awaited = (each for each in view.requests if not each.is_batch)
            following = next(awaited, None) or typical_request(node, task, view.now_s)
            # The task delays requests on its own node alone.
            after = (path.task,) if node is chosen else ()
            path_of_next = plan_path(node, following, view.now_s, after=after)
            alone_s = node.num_stages * node.profile.forward.seconds(following.num_tokens)
            if path_of_next.response_s <= (following.ttft_s or self.slo_times * alone_s):
                return False
        return True


def length_consistency(node: NodeView, length: int) -> float:
    """Return LC: the density, per token, of a length among the node's earlier ones (equation 2)."""
    lengths = node.lengths
    if not lengths.count:
        return 1 / (sqrt(2 * pi) * max(1, length))
    deviation = max(lengths.deviation, _MIN_DEVIATION * lengths.mean, 1.0)
    return exp(-(((length - lengths.mean) / deviation) ** 2) / 2) / (sqrt(2 * pi) * deviation)


def typical_length(node: NodeView, task: ClusterTask) -> int:
    """Return the mean length of tasks on a node; if there were none, that of this task."""
    return max(1, round(node.lengths.mean)) if node.lengths.count else task.num_tokens


def typical_request(node: NodeView, task: ClusterTask, now_s: float) -> ClusterTask:
    """Return a request that arrives now, of the mean length of tasks here."""
    return ClusterTask(
        id="", kind="request", arrival_s=now_s, num_tokens=typical_length(node, task)
    )
