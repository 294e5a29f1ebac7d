"""Default placement: on the node that answers soonest with what it has cached, with training only
where requests leave time for it.

Beyond LeMix:

- A prompt takes less on a node that has its prefix or its adapter. That is part of the response
  time, so that an idle node without them wins where the others have queues.
- The engine of a node reports its slack, the share of its time that its requests' SLOs leave over.
  A node with little slack gets requests later, and training last.
- Tasks are bound late: a node gets a task when it is about to need one, so that none waits on one
  node while another is idle. An engine needs several, since its steps batch prompts; plans of one
  pass after the other say little of when it begins them, so that their number alone bounds what
  waits there. Until then tasks are in one queue: first requests that can still be in time, by their
  priorities and deadlines; then training; then requests that are late in any case, which nobody
  gains from hurrying (as within a device, `scheduling.slo.deadlines`). Late ones are bound where
  they delay no others, as training is, and as soon as a first stage is about to be free, so that no
  later stage runs out of work.
- Batch work is bound last of all, when no request waits here. An engine runs it in what requests
  leave, so that it delays none there, and several may wait on a node, where each of its steps finds
  enough of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coserve.cluster.paths import ExecutionPath, plan_path
from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.placement.lemix import typical_length, typical_request
from coserve.cluster.queues import DeadlineQueue, TaskQueue, deadline, kinds_of
from coserve.cluster.view import ClusterTask, ClusterView, Decision, NodeView, Placed, Waits
from coserve.settings import setting

_CHECK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class SlackAffinity(PlacementPolicy):
    """The default placement, as the module describes it."""

    summary: ClassVar[str] = (
        "soonest answer with cached prefixes and adapters, training in what SLOs leave over"
    )
    uses_prefixes: ClassVar[bool] = True

    adapter_load_s: float = setting(0.5, "Seconds that a node takes to load an adapter.")
    slack_weight: float = setting(
        0.5, "How much longer a response counts on a node without slack, as a share of it."
    )
    backlog: float = setting(
        1.0,
        "A request waits until a node would begin it within this many mean forward passes; on "
        "engines it does not.",
    )
    most_waiting: int = setting(
        1,
        "Tasks that may wait on a node that runs one pass at a time; others wait in the cluster's "
        "queue.",
        least=1,
    )
    most_prompts: int = setting(
        4, "Tasks that may wait on an engine, whose steps take several prompts.", least=1
    )
    most_batch_waiting: int = setting(
        16,
        "Batch requests that may wait on a node, where they delay no others.",
        least=1,
    )
    slo_times: float = setting(
        5.0, "TTFT SLO of requests without one, in forward passes of their own.", least=1
    )
    reserve: float = setting(
        0.2, "Share of a request's SLO that training and late requests must leave.", most=1.0
    )
    max_defer_s: float = setting(
        60.0,
        "Seconds after which a task is placed before all others of its priority; not batch work.",
    )

    def queue(self) -> TaskQueue:
        """Return a queue by priority: aged tasks, requests that can be in time by their deadlines,
        training, late requests. Batch work is last.
        """
        return DeadlineQueue(
            slo_times=self.slo_times, max_defer_s=self.max_defer_s, has_room=self.has_room
        )

    def has_room(self, node: NodeView) -> bool:
        """Return whether one more task may wait on a node."""
        return node.num_waiting < (
            self.most_prompts if node.profile.training_yields else self.most_waiting
        )

    def choose(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> Decision:
        if not any(map(self.has_room, nodes)):
            return Waits("tasks wait on every node", _CHECK_S)
        waited_s = view.now_s - task.arrival_s
        # 1. Nodes with memory for it; any node, once it has waited for T_max.
        fitting = [node for node in nodes if node.has_memory(task)]
        if not fitting and waited_s < min([node.profile.longest_wait_s for node in nodes]):
            return Waits("no node has memory for it", _CHECK_S)
        # 2. Of these, nodes where one more task may wait.
        free = [node for node in fitting or nodes if self.has_room(node)]
        if task.trains:
            free = [node for node in free if node.slack > 0]
        elif task.is_batch:
            free = [node for node in free if node.num_batch_waiting < self.most_batch_waiting]
        if not free:
            return Waits("tasks wait on every node, or requests need all of it", _CHECK_S)
        planned = [(node, self._plan(view, task, node)) for node in free]
        # 3. What does not hurry only goes where the next request stays in time. Engines see to that
        # themselves, since their training yields.
        hurries = not task.trains and not task.is_batch and not self._is_late(view, task, nodes)
        if (
            not hurries
            and view.request_rate
            and waited_s < self.max_defer_s
            and not nodes[0].profile.training_yields
        ):
            planned = self._harmless(view, task, planned, nodes)
            if not planned:
                return Waits("requests would miss their SLO", _CHECK_S)
        # 4. The least cost. A request that would only wait there waits here, and is bound late.
        node, path = min(planned, key=lambda pair: self._cost(task, pair[0], pair[1]))
        if hurries and not node.profile.training_yields:
            early_s = self._queue_s(view, task, node, path) - self.backlog * self._mean_s(
                task, node
            )
            if early_s > 0:
                return Waits("every node has enough to do", early_s)
        return Placed(node.id, path.task, offloads=not fitting and not task.is_batch)

    def _plan(self, view: ClusterView, task: ClusterTask, node: NodeView) -> ExecutionPath:
        return plan_path(node, task, view.now_s, num_cached=node.num_cached_tokens(task))

    def _cost(self, task: ClusterTask, node: NodeView, path: ExecutionPath) -> float:
        """Return the seconds to the response, increased where there is little slack or the adapter
        is not loaded.
        """
        seconds = path.response_s
        if task.adapter is not None and task.adapter not in node.adapters:
            seconds += self.adapter_load_s
        return seconds * (1 + self.slack_weight * (1 - node.slack))

    def _is_late(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> bool:
        """Return whether a request cannot be in time on any node, even if it began now, alone."""
        return view.now_s > deadline(task, kinds_of(nodes), slo_times=self.slo_times).latest_begin_s

    def _mean_s(self, task: ClusterTask, node: NodeView) -> float:
        """Return the seconds of a request of mean length on a node, in all stages."""
        return node.num_stages * node.profile.forward.seconds(typical_length(node, task))

    def _queue_s(
        self, view: ClusterView, task: ClusterTask, node: NodeView, path: ExecutionPath
    ) -> float:
        """Return the seconds that a request would wait within a node, in all stages."""
        num_tokens = task.num_tokens - node.num_cached_tokens(task)
        alone_s = node.num_stages * node.profile.forward.seconds(num_tokens, task.batch_size)
        return path.task.forward_end_s[-1] - view.now_s - alone_s

    def _harmless(
        self,
        view: ClusterView,
        task: ClusterTask,
        planned: Sequence[tuple[NodeView, ExecutionPath]],
        nodes: Sequence[NodeView],
    ) -> list[tuple[NodeView, ExecutionPath]]:
        """Return where training or a late request may go: it begins soon, and as many nodes as the
        other requests need still answer the next one in time. Of these, return the node with most
        slack, and then the busiest, so that others stay free.
        """
        stage_s = self._mean_s(task, nodes[0]) / nodes[0].num_stages
        # Offered load: the number of nodes that requests keep busy at this rate.
        num_needed = max(1.0, view.request_rate * stage_s)
        latest_s = view.now_s + self.backlog * stage_s
        soon = [pair for pair in planned if pair[1].task.forward_start_s[0] <= latest_s]
        if not soon:
            return []
        open_nodes = {node.id for node in nodes if self._is_open(view, task, node)}
        for node, path in sorted(soon, key=lambda pair: (-pair[0].slack, -pair[1].response_s)):
            num_open = len(open_nodes - {node.id})
            if (
                # Enough nodes stay open without this one, or this one stays open with the task.
                num_open >= num_needed
                or num_open + self._is_open(view, task, node, path) >= num_needed
            ):
                return [(node, path)]
        return []

    def _is_open(
        self,
        view: ClusterView,
        task: ClusterTask,
        node: NodeView,
        path: ExecutionPath | None = None,
    ) -> bool:
        """Return whether the next request would be answered in time on a node, after a task with
        this path if one is passed.
        """
        following = typical_request(node, task, view.now_s)
        alone_s = self._mean_s(task, node)
        after = () if path is None else (path.task,)
        response_s = plan_path(node, following, view.now_s, after=after).response_s
        return node.slack > 0 and response_s <= (1 - self.reserve) * self.slo_times * alone_s
