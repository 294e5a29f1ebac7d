"""The cluster's queue: the tasks that have no node yet, the views of the nodes, and the assignment
of tasks to nodes.

The scheduler keeps books and asks the placement, which is pure. It reads no clock, sends nothing
and does not use Ray, so that real nodes and modelled ones in virtual time are scheduled by the same
code. Of LeMix's three levels (section V-C) this is the second: a load balancer may stand before
several clusters, and each node's engine decides on its own steps.

A decision takes O(nodes), and what the placement takes.
"""

from collections import deque
from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.view import (
    ClusterTask,
    ClusterView,
    LengthStats,
    NodeView,
    Placed,
    PlannedTask,
    TaskKind,
)
from coserve.scheduling.fairness import TokenCounters, TokenWeights

# Interval at which callers ask again while tasks wait.
RETRY_S = 0.1
# Window of the rate of requests, in seconds.
_RATE_S = 2.0
_NUM_KINDS = len(get_args(TaskKind))


class _Node:
    """A node's last report, and the tasks that were placed on it since and before."""

    def __init__(self, report: NodeView) -> None:
        self.report = report
        self.tasks: dict[str, PlannedTask | None] = {}
        self._unknown = set[str]()  # counted as waiting, until they begin or a report counts them
        self._batch = set[str]()  # of the tasks, batch work that gives way
        self.last: PlannedTask | None = None
        self.lengths = LengthStats()
        self._view: NodeView | None = None

    def view(self) -> NodeView:
        if self._view is None:
            queue = tuple([path for path in self.tasks.values() if path is not None])
            self._view = replace(
                self.report,
                lengths=self.lengths,
                num_tasks=len(self.tasks),
                queue=queue,
                last=self.last,
            )
        return self._view

    def use(self, report: NodeView) -> None:
        self.report = report
        self._view = None
        # A new report counts every task that has arrived there.
        self._unknown.clear()

    def place(self, task: ClusterTask, path: PlannedTask | None) -> None:
        """Count a task, until the next report, as if it had its pages, its prefix and its adapter
        already. Pages of batch work remain free for others.
        """
        report = self.report
        gives_way = report.profile.gives_way(task)
        if gives_way and task.is_batch:
            self._batch.add(task.id)
            self.report = replace(report, num_batch_waiting=report.num_batch_waiting + 1)
        else:
            free = max(0, report.num_free_pages - report.num_pages_of(task))
            self.report = replace(report, num_free_pages=free, num_waiting=report.num_waiting + 1)
        if task.adapter is not None and task.adapter not in report.adapters:
            self.report = replace(self.report, adapters=report.adapters | {task.adapter})
        if task.prefix:
            self.report = replace(self.report, prefixes=report.prefixes.union(task.prefix))
        self.tasks[task.id] = path
        self._unknown.add(task.id)
        if not gives_way:  # others do not run after it
            self.last = path or self.last
        self.lengths = self.lengths.add(task.num_tokens)
        self._view = None

    def calibrate(self, path: PlannedTask) -> None:
        if path.task in self.tasks:
            self.tasks[path.task] = path
            self._view = None
        if self.last is not None and self.last.task == path.task:
            self.last = path
            self._view = None

    def begin(self, task: str, now_s: float) -> None:
        """Count a task as running, until the next report."""
        self._unknown.discard(task)
        self._wait_no_more(task, running=1)
        if (path := self.tasks.get(task)) is not None:
            self.calibrate(_ended_forward(path, now_s))

    def finish(self, task: str) -> None:
        self._view = None
        self.tasks.pop(task, None)
        # No report has counted the task: take back what `place` has counted.
        if task in self._unknown:
            self._unknown.remove(task)
            self._wait_no_more(task, running=0)
        self._batch.discard(task)

    def _wait_no_more(self, task: str, *, running: int) -> None:
        """Count one waiting task of its sort less, and as many more running ones."""
        report, self._view = self.report, None
        if task in self._batch:
            waiting, running = (
                max(0, report.num_batch_waiting - 1),
                report.num_batch_running + running,
            )
            self.report = replace(report, num_batch_waiting=waiting, num_batch_running=running)
        else:
            waiting, running = max(0, report.num_waiting - 1), report.num_running + running
            self.report = replace(report, num_waiting=waiting, num_running=running)


def _ended_forward(path: PlannedTask, now_s: float) -> PlannedTask:
    """Return a path whose forward pass has ended now, with every stage shifted alike."""
    late_s = now_s - path.forward_end_s[-1]
    return replace(
        path,
        forward_start_s=tuple([start_s + late_s for start_s in path.forward_start_s]),
        forward_end_s=tuple([end_s + late_s for end_s in path.forward_end_s]),
    )


class ClusterScheduler:
    """Scheduler of the cluster's tasks.

    Tasks are submitted once; `place` assigns them, and the caller reports their ends. Nodes report
    as often as they like. Removing a node returns its tasks, for the caller to submit again.
    """

    def __init__(self, placement: PlacementPolicy, weights: TokenWeights | None = None) -> None:
        """Begin without nodes.

        Args:
            placement: Decides where tasks go.
            weights: What tokens cost tenants, where waiting requests are shared out among these, as
                on a device by a fair policy (`Policy.is_fair`); None: they are not.
        """
        self.placement = placement
        self._order = placement.queue()
        self._nodes: dict[str, _Node] = {}
        self._ranks: dict[
            str, int
        ] = {}  # of nodes that there ever were: one that comes back has its place again
        self._waiting: dict[TaskKind, dict[str, ClusterTask]] = {
            kind: {} for kind in get_args(TaskKind)
        }
        self._queues: dict[TaskKind, tuple[ClusterTask, ...] | None] = dict.fromkeys(
            self._waiting, ()
        )  # None: they changed
        self._counters = None if weights is None else TokenCounters(weights)
        self._came_after_s: dict[str, float | None] = {}
        self._last_arrival_s: float | None = None
        self._arrivals_s: deque[float] = deque()
        self._num_placed = {"request": 0, "training": 0}
        self._node_of: dict[str, str] = {}
        self._num_changes = 0  # of what is known of nodes
        # By kind: the task that last had to wait, until when, and the number of changes by then.
        self._told_to_wait: dict[TaskKind, tuple[str, float, int]] = {}

    # -- questions ----------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of tasks that have no node yet."""
        return sum(map(len, self._waiting.values()))

    def node_of(self, task: str) -> str | None:
        """Return the node of a task; None: it has none yet, or has ended."""
        return self._node_of.get(task)

    def view(self, now_s: float, task: str = "") -> ClusterView:
        """Return the cluster as a placement sees it when this task is to be placed."""
        while self._arrivals_s and self._arrivals_s[0] < now_s - _RATE_S:
            self._arrivals_s.popleft()
        return ClusterView(
            now_s=now_s,
            nodes=tuple([node.view() for node in self._nodes.values()]),
            requests=self._queue("request"),
            training=self._queue("training"),
            num_requests_placed=self._num_placed["request"],
            num_training_placed=self._num_placed["training"],
            last_arrival_s=self._came_after_s.get(task),
            request_rate=len(self._arrivals_s) / _RATE_S,
            tenants=() if self._counters is None else self._counters.views(),
            prompt_weight=1.0 if self._counters is None else self._counters.weights.prompt,
        )

    # -- nodes --------------------------------------------------------------------------

    def report(self, node: NodeView) -> None:
        """Take in a node's view of itself, the first time or again."""
        self._num_changes += 1
        if (known := self._nodes.get(node.id)) is None:
            self._ranks.setdefault(node.id, len(self._ranks))
            # In a fixed order, since placements that take turns count along it.
            nodes = self._nodes | {node.id: _Node(node)}
            self._nodes = {id: nodes[id] for id in sorted(nodes, key=self._ranks.__getitem__)}
        else:
            known.use(node)

    def remove(self, node: str) -> tuple[str, ...]:
        """Remove a node, and return the ids of its tasks; no error if it is not known."""
        self._num_changes += 1
        gone = self._nodes.pop(node, None)
        tasks = tuple(gone.tasks) if gone is not None else ()
        for task in tasks:
            self._node_of.pop(task, None)
        return tasks

    # -- tasks --------------------------------------------------------------------------

    def submit(self, task: ClusterTask) -> None:
        """Queue a task for `place`."""
        assert task.id not in self._waiting[task.kind], f"{task.id} waits already"
        # The arrival before this one, which is a₋₁ in LeMix's idleness profit.
        self._came_after_s[task.id], self._last_arrival_s = self._last_arrival_s, task.arrival_s
        self._waiting[task.kind][task.id], self._queues[task.kind] = task, None
        self._order.add(task)
        if self._counters is not None and not task.trains:
            self._counters.arrive(task.tenant, task.id)
        # Batch work has no SLO to miss, so it is not part of the request rate.
        if not task.trains and not task.is_batch:
            self._arrivals_s.append(task.arrival_s)

    def withdraw(self, task: str) -> bool:
        """Remove a task from the queue, and return whether it waited there."""
        self._came_after_s.pop(task, None)
        for kind, waiting in self._waiting.items():
            if (withdrawn := waiting.pop(task, None)) is not None:
                self._queues[kind] = None
                self._stop_waiting(withdrawn)
                return True
        return False

    def place(self, now_s: float) -> Iterator[tuple[ClusterTask, Placed]]:
        """Place what can be placed now, one task after the other.

        When a task waits, those of its kind after it wait, too; but one that excludes nodes holds
        up none.
        """
        stopped = set[TaskKind]()
        # The order is computed once; `_decide` sees the cluster as it is after each placement.
        for task in self._order.order(self.view(now_s), stopped):
            if len(stopped) == _NUM_KINDS:
                return
            if task.kind in stopped:
                continue
            if self._still_waits(task, now_s) or (decision := self._decide(task, now_s)) is None:
                if not task.excluded:
                    stopped.add(task.kind)
                continue
            self._place(task, decision)
            yield task, decision

    def _still_waits(self, task: ClusterTask, now_s: float) -> bool:
        """Return whether the placement need not be asked: it has said how long this task waits, and
        no node has changed.
        """
        id, until_s, num_changes = self._told_to_wait.get(task.kind, ("", 0.0, 0))
        return id == task.id and now_s < until_s and num_changes == self._num_changes

    def _decide(self, task: ClusterTask, now_s: float) -> Placed | None:
        decision = self.placement.place(self.view(now_s, task.id), task)
        if isinstance(decision, Placed):
            return decision
        self._told_to_wait[task.kind] = task.id, now_s + decision.seconds, self._num_changes
        return None

    def calibrate(self, path: PlannedTask) -> None:
        """Replace the planned path of a task by the measured one (LeMix algorithm 2, lines 14 and
        17).
        """
        if (node := self._node_of.get(path.task)) is not None:
            self._num_changes += 1
            self._nodes[node].calibrate(path)

    def begin(self, task: str, now_s: float) -> None:
        """Note that a request has its first token: it waits no more, and its forward pass took
        until now.
        """
        if (node := self._node_of.get(task)) is not None:
            self._num_changes += 1
            self._nodes[node].begin(task, now_s)

    def answered(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for tokens of its answers."""
        if self._counters is not None:
            self._counters.charge(tenant, output=num_tokens)

    def num_tasks(self, node: str) -> int:
        """Return the number of tasks that were placed on a node and have not ended."""
        return len(self._nodes[node].tasks)

    def finish(self, task: str) -> None:
        """Note that a placed task has ended, well or not; no error if it is not known."""
        if (node := self._node_of.pop(task, None)) is not None:
            self._num_changes += 1
            self._nodes[node].finish(task)

    def _stop_waiting(self, task: ClusterTask) -> None:
        self._order.remove(task)
        if self._counters is not None and not task.trains:
            self._counters.leave(task.tenant, task.id)

    def _queue(self, kind: TaskKind) -> tuple[ClusterTask, ...]:
        """Return the waiting tasks of a kind; the tuple is cached while they do not change."""
        queue = self._queues[kind]
        if queue is None:
            queue = self._queues[kind] = tuple(self._waiting[kind].values())
        return queue

    def _place(self, task: ClusterTask, decision: Placed) -> None:
        self._num_changes += 1
        del self._waiting[task.kind][task.id]
        self._stop_waiting(task)
        if self._counters is not None and not task.trains:
            self._counters.charge(task.tenant, prompt=task.batch_size * task.num_tokens)
        self._queues[task.kind] = None
        self._came_after_s.pop(task.id, None)
        self._num_placed[task.kind] += 1
        self._node_of[task.id] = decision.node
        self._nodes[decision.node].place(task, decision.path)
