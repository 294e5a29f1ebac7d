"""A node as in LeMix: a pipeline of stages, each of which runs one pass at a time (sections II-A
and IV-D).

Requests are forward passes through all stages; training tasks run backward after that, through the
stages in reverse. A stage runs a pass to its end; of those that are ready for it, a backward pass
goes first (in algorithm 1 forward passes wait for them), then the one that arrived first. Requests
are batched (algorithm 3): up to C of those that wait in a row, for T_w at most. Where training is
bounded, further training tasks wait before the first stage, and tasks that arrive after them pass.
A batch is padded to its longest prompt. A task begins where its pages stay below κ of the pool's;
after T_max without, caches of others are copied to the host for it, which takes its time (algorithm
2).
"""

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from coserve.cluster.view import ClusterTask, NodeProfile, NodeView, Placed, PlannedTask
from experiments.cluster_simulation.node import ModelledReport, Progress

# What counts as of late, for utilisation.
_RECENT_S = 1.0


class _Job(NamedTuple):
    """Tasks that pass through the stages together: requests as a batch, or one training task."""

    tasks: tuple[ClusterTask, ...]
    """The tasks."""
    num_pages: int
    """Pages that they hold."""
    forward_s: float
    """Seconds of a forward pass in a stage."""
    backward_s: float
    """Seconds of a backward pass in a stage; 0 for requests."""
    starts_s: list[float]
    """Starts of the forward passes, by stage."""
    ends_s: list[float]
    """Ends of the forward passes, by stage."""
    backward_starts_s: list[float]
    """Starts of the backward passes, from the last stage."""
    backward_ends_s: list[float]
    """Ends of the backward passes, from the last stage."""

    @property
    def trains(self) -> bool:
        return self.tasks[0].trains


class PipelineNode:
    """A node with a pipeline of stages (`experiments.cluster_simulation.node.ModelledNode`).

    Args:
        training_in_flight: Maximum number of training tasks at once (`NodeView`).
        num_pages: Pages of the pool, over all stages.
        batch_size: C.
        batch_wait_s: T_w.
        offload_s: Seconds to copy a page to the host.
    """

    def __init__(
        self,
        name: str,
        profile: NodeProfile,
        *,
        hardware: str = "",
        num_stages: int = 2,
        training_in_flight: int | None = None,
        num_pages: int = 0,
        batch_size: int = 1,
        batch_wait_s: float = 0.0,
        offload_s: float = 0.0,
    ) -> None:
        self.id, self.profile, self.num_stages = name, profile, num_stages
        self._hardware, self._num_pages, self._used = hardware, num_pages, 0
        self._training_in_flight, self._num_training = training_in_flight, 0
        self._batch_size, self._batch_wait_s, self._offload_s = batch_size, batch_wait_s, offload_s
        self._queue: deque[tuple[ClusterTask, float]] = deque()  # not begun, and when each came
        self._held: deque[tuple[ClusterTask, float]] = (
            deque()
        )  # training tasks that were first there, while too many train
        self._ready: list[list[tuple[bool, int, _Job]]] = [[] for _ in range(num_stages)]
        self._running: list[tuple[float, bool, _Job] | None] = [None] * num_stages
        self._stage_s = [0.0] * num_stages  # busy
        self._blocked_s = 0.0  # until when stages copy to the host
        self._wakes_s: list[float] = []
        self._number = 0
        self._now_s = 0.0
        self._recent = (0.0, 0.0, 0.0)  # begin, busy_s then, utilisation before
        self.num_trained = 0
        self.num_offloaded = 0

    @property
    def next_s(self) -> float:
        ends = [running[0] for running in self._running if running is not None]
        return min([*ends, *self._wakes_s[:1]], default=inf)

    @property
    def busy_s(self) -> float:
        return sum(self._stage_s) / self.num_stages

    def add(self, task: ClusterTask, placed: Placed, now_s: float) -> list[ModelledReport]:
        if placed.offloads and self._num_pages:
            self._offload(task, now_s)
        self._queue.append((task, now_s))
        self._begin(now_s)
        return [ModelledReport(now_s, view=self.report(now_s))]

    def advance(self, now_s: float) -> list[ModelledReport]:
        progress: list[Progress] = []
        while (next_s := self.next_s) <= now_s:
            while self._wakes_s and self._wakes_s[0] <= next_s:
                heappop(self._wakes_s)
            for stage, running in enumerate(self._running):
                if running is not None and running[0] <= next_s:
                    self._running[stage] = None
                    progress += self._ended(stage, running[1], running[2], next_s)
            self._begin(next_s)
        self._now_s = now_s
        return [ModelledReport(now_s, progress, self.report(now_s))]

    def report(self, now_s: float) -> NodeView:
        begin_s, busy_s, before = self._recent
        if now_s - begin_s >= _RECENT_S:
            before = (self.busy_s - busy_s) / (now_s - begin_s)
            self._recent = now_s, self.busy_s, before
        return NodeView(
            id=self.id,
            hardware=self._hardware,
            profile=self.profile,
            num_stages=self.num_stages,
            training_in_flight=self._training_in_flight,
            num_waiting=len(self._queue)
            + len(self._held)
            + sum(is_forward for is_forward, _, _ in self._ready[0]),
            utilisation=min(1.0, before),
            num_pages=self._num_pages,
            num_free_pages=max(0, self._num_pages - self._used),
        )

    def pause(self, now_s: float, seconds: float) -> None:
        """Start no pass for some seconds, such as while weights are loaded."""
        self._blocked_s = max(self._blocked_s, now_s) + seconds
        self._wake(self._blocked_s)

    # -- passes -------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Start all that can start now."""
        first_is_free = self._running[0] is None and not self._ready[0]
        if first_is_free and self._has_next() and self._can_begin(now_s):
            self._enter(now_s)
        for stage in range(self.num_stages):
            ready = self._ready[stage]
            if self._running[stage] is not None or not ready or now_s < self._blocked_s:
                continue
            is_forward, _, job = heappop(ready)
            backward = not is_forward
            seconds = job.backward_s if backward else job.forward_s
            (job.backward_starts_s if backward else job.starts_s).append(now_s)
            self._running[stage] = now_s + seconds, backward, job
            self._stage_s[stage] += seconds

    def _has_next(self) -> bool:
        """Return whether a task of the queue may begin, past training tasks that have to wait."""
        may_train = (
            self._training_in_flight is None or self._num_training < self._training_in_flight
        )
        if may_train:
            self._queue.extendleft(reversed(self._held))
            self._held.clear()
        while self._queue and self._queue[0][0].trains and not may_train:
            self._held.append(self._queue.popleft())
        return bool(self._queue)

    def _can_begin(self, now_s: float) -> bool:
        """Return whether the first task of the queue may begin: there is memory, and its batch is
        full or has waited.
        """
        task, came_s = self._queue[0]
        if self._num_pages:
            view = self.report(now_s)
            allowed = self.profile.memory_share * self._num_pages
            if self._used and self._used + view.num_pages_of(task) > allowed:
                if now_s < came_s + self.profile.longest_wait_s:
                    self._wake(came_s + self.profile.longest_wait_s)
                    return False
                self._offload(task, now_s)
        if task.trains or self._batch_size == 1 or len(self._batch()) == self._batch_size:
            return True
        if now_s < came_s + self._batch_wait_s and not any(one.trains for one, _ in self._queue):
            self._wake(came_s + self._batch_wait_s)
            return False
        return True

    def _batch(self) -> list[ClusterTask]:
        """Return the first task and those that may pass together with it."""
        batch: list[ClusterTask] = []
        for task, _ in self._queue:
            if len(batch) == self._batch_size or task.trains:
                break
            batch.append(task)
        return batch or [self._queue[0][0]]

    def _enter(self, now_s: float) -> None:
        batch = tuple(self._batch())
        for _ in batch:
            self._queue.popleft()
        longest, number = (
            max(task.num_tokens for task in batch),
            sum(task.batch_size for task in batch),
        )
        view = self.report(now_s)
        pages = sum(view.num_pages_of(task) for task in batch) if self._num_pages else 0
        forward_s = self.profile.forward.seconds(longest, number)
        backward_s = self.profile.backward.seconds(longest, number) if batch[0].trains else 0.0
        job = _Job(batch, pages, forward_s, backward_s, [], [], [], [])
        self._used += pages
        self._num_training += job.trains
        self._push(0, False, job)

    def _push(self, stage: int, backward: bool, job: _Job) -> None:
        self._number += 1
        heappush(self._ready[stage], (not backward, self._number, job))

    def _ended(self, stage: int, backward: bool, job: _Job, now_s: float) -> list[Progress]:
        """Handle the end of a stage's pass, and return the progress."""
        if backward:
            job.backward_ends_s.append(now_s)
            if stage:
                self._push(stage - 1, True, job)
                return []
            self.num_trained += len(job.tasks)
            self._num_training -= 1
            self._used -= job.num_pages
            return [Progress(task.id, end_s=now_s, path=_path(task, job)) for task in job.tasks]
        job.ends_s.append(now_s)
        if stage + 1 < self.num_stages:
            self._push(stage + 1, False, job)
            return []
        if job.trains:
            self._push(stage, True, job)
            return []
        self._used -= job.num_pages
        return [
            Progress(task.id, first_token_s=now_s, end_s=now_s, path=_path(task, job))
            for task in job.tasks
        ]

    def _offload(self, task: ClusterTask, now_s: float) -> None:
        """Copy caches to the host until there is memory for a task, while the stages wait."""
        allowed = self.profile.memory_share * self._num_pages
        needed = self.report(now_s).num_pages_of(task)
        over = min(self._used, max(0, int(self._used + needed - allowed)))
        if over:
            self.num_offloaded += over
            # They come back when there is room; the way back is counted at once.
            self.pause(now_s, 2 * over * self._offload_s)

    def _wake(self, at_s: float) -> None:
        heappush(self._wakes_s, at_s)


def _path(task: ClusterTask, job: _Job) -> PlannedTask:
    return PlannedTask(
        task=task.id,
        kind=task.kind,
        arrival_s=task.arrival_s,
        forward_start_s=tuple(job.starts_s),
        forward_end_s=tuple(job.ends_s),
        backward_start_s=tuple(reversed(job.backward_starts_s)),
        backward_end_s=tuple(reversed(job.backward_ends_s)),
    )
