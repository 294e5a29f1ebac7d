"""A cluster in virtual time: tasks arrive, the scheduler places them on modelled nodes, and their
outcomes are recorded.

The scheduler and the placements are those of real nodes. As there, the scheduler knows the nodes'
reports and what it has placed since, and the placement runs when a task arrives, when a request has
its first token, and when a node reports its state.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.scheduler import RETRY_S, ClusterScheduler
from coserve.cluster.view import ClusterTask
from experiments.cluster_simulation.node import ModelledNode, ModelledReport, Progress


@dataclass(kw_only=True, slots=True)
class TaskOutcome:
    """Outcome of a task as its sender sees it, in seconds; None: not reached."""

    task: ClusterTask
    """The task."""
    node: str | None = None
    """Node that it is placed on."""
    placed_s: float | None = None
    """Time of the placement."""
    first_token_s: float | None = None
    """Time of the first token."""
    end_s: float | None = None
    """Time of the end."""

    @property
    def response_s(self) -> float:
        """Return the seconds from arrival to the first token; inf without one."""
        return inf if self.first_token_s is None else self.first_token_s - self.task.arrival_s


@dataclass(kw_only=True)
class SimulationResult:
    """Result of a run."""

    outcomes: dict[str, TaskOutcome]
    """Outcomes by task."""
    busy_s: dict[str, float]
    """Seconds of work by node."""
    end_s: float = 0.0
    """End of the last task."""
    scheduling_s: float = 0.0
    """Real processor seconds of the scheduler and the placement."""
    num_placed: int = 0
    """Number of placed tasks."""

    @property
    def requests(self) -> list[TaskOutcome]:
        """Return the outcomes of requests."""
        return [one for one in self.outcomes.values() if not one.task.trains]

    @property
    def throughput(self) -> float:
        """Return the finished tasks per second."""
        return (
            sum(one.end_s is not None for one in self.outcomes.values()) / self.end_s
            if self.end_s
            else 0.0
        )

    @property
    def utilisation(self) -> float:
        """Return the busy share of all nodes' time."""
        return sum(self.busy_s.values()) / (len(self.busy_s) * self.end_s) if self.end_s else 0.0

    def attainment(self, slo_s: float) -> float:
        """Return the share of requests whose first token arrived within this time, or within their
        own SLO.
        """
        held = [one.response_s <= (one.task.ttft_s or slo_s) for one in self.requests]
        return sum(held) / len(held) if held else 1.0


class ClusterSimulation:
    """Nodes, a scheduler, and tasks that arrive.

    Args:
        nodes: The nodes.
        placement: The placement.
        on_end: Function that is called with each finished task and the time.
        messages_s: Seconds from a node's report until the scheduler gets it.
    """

    def __init__(
        self,
        nodes: Sequence[ModelledNode],
        placement: PlacementPolicy,
        *,
        on_end: Callable[[TaskOutcome, float], None] | None = None,
        messages_s: float = 0.0,
    ) -> None:
        self._nodes = {node.id: node for node in nodes}
        self._scheduler = ClusterScheduler(placement)
        self._on_end, self._messages_s = on_end, messages_s
        self._said: list[
            tuple[float, int, ModelledReport]
        ] = []  # and not heard yet: when it will be, and in which order
        self._numbers = count()
        for node in nodes:
            self._scheduler.report(node.report(0.0))

    def run(self, tasks: Iterable[ClusterTask], *, until_s: float = inf) -> SimulationResult:
        """Run all tasks to their ends, or until a time."""
        queue = sorted(tasks, key=lambda task: task.arrival_s)
        ran = SimulationResult(outcomes={}, busy_s={})
        nodes, scheduler = list(self._nodes.values()), self._scheduler
        index, retry_s = 0, 0.0
        while True:
            upcoming_s = queue[index].arrival_s if index < len(queue) else inf
            heard_s = self._said[0][0] if self._said else inf
            now_s = min(upcoming_s, heard_s, min([node.next_s for node in nodes]))
            if scheduler.num_waiting:
                now_s = min(now_s, retry_s)
            if now_s == inf or now_s > until_s:
                break
            asks = now_s >= retry_s
            for node in nodes:
                if node.next_s <= now_s:
                    self._say(node.advance(now_s))
                    asks |= self._hear(now_s, ran)
            asks |= self._hear(now_s, ran)
            while index < len(queue) and queue[index].arrival_s <= now_s:
                task = queue[index]
                index, asks = index + 1, True
                ran.outcomes[task.id] = TaskOutcome(task=task)
                scheduler.submit(task)
            if scheduler.num_waiting and asks:
                self._place(now_s, ran)
                retry_s = now_s + RETRY_S
        for node in nodes:
            if until_s < inf:
                self._say(node.advance(until_s))
                self._hear(until_s, ran)
            ran.busy_s[node.id] = node.busy_s
        ran.end_s = min(
            until_s, max([one.end_s or 0.0 for one in ran.outcomes.values()], default=0.0)
        )
        return ran

    def _place(self, now_s: float, ran: SimulationResult) -> None:
        begin_s = time.thread_time()
        placed = list(self._scheduler.place(now_s))
        ran.scheduling_s += time.thread_time() - begin_s
        ran.num_placed += len(placed)
        for task, decision in placed:
            outcome = ran.outcomes[task.id]
            outcome.node, outcome.placed_s = decision.node, now_s
            self._say(self._nodes[decision.node].add(task, decision, now_s))
        self._hear(now_s, ran)

    def _say(self, said: Iterable[ModelledReport]) -> None:
        for each in said:
            heappush(self._said, (each.at_s + self._messages_s, next(self._numbers), each))

    def _hear(self, now_s: float, ran: SimulationResult) -> bool:
        """Take the reports that have arrived, and return whether something may be placed because of
        them.
        """
        asks = False
        while self._said and self._said[0][0] <= now_s:
            heard_s, _, said = heappop(self._said)
            for progress in said.progress:
                asks |= progress.first_token_s is not None
                self._take(progress, heard_s, ran)
            if said.view is not None:
                self._scheduler.report(said.view)
                asks = True
        return asks

    def _take(self, progress: Progress, heard_s: float, ran: SimulationResult) -> None:
        outcome = ran.outcomes[progress.task]
        if progress.first_token_s is not None:
            outcome.first_token_s = progress.first_token_s + self._messages_s
            self._scheduler.begin(progress.task, heard_s)
        if progress.path is not None:
            self._scheduler.calibrate(progress.path)
        if progress.end_s is not None:
            outcome.end_s = progress.end_s + self._messages_s
            self._scheduler.finish(progress.task)
            if self._on_end is not None:
                self._on_end(outcome, heard_s)
