"""Driver of the jobs that are each on one node of a cluster, or wait for one: events in, `apply`,
`plan`, and the planned actions (`coserve.cluster.jobs.placed_job`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from coserve.cluster.jobs.placed_job import (
    Action,
    ChangeRequested,
    CheckpointFailed,
    Event,
    NodeAssigned,
    PlacedJob,
    apply,
    plan,
)
from coserve.cluster.nodes.registry import ClusterNode
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.tasks import task_of_job
from coserve.engine.commands import AdapterRef, JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.errors import CoserveError, EngineGoneError, JobOverError
from coserve.jobs.lifecycle.events import RequestClosed
from coserve.jobs.messages import Checkpointed

_log = logging.getLogger(__name__)

# Adapters of succeeded jobs that are kept: a request may name one before the catalogue has its
# directory.
_MAX_TRAINED = 100


@dataclass(kw_only=True, eq=False)
class _Job:
    """A job that was started, and what this process does for it."""

    state: PlacedJob
    """The job itself."""
    late_start: "asyncio.Task[None] | None" = None
    """Task that sends the job to the node that it was assigned last."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a task changes the job."""

    @property
    def id(self) -> str:
        return self.state.start.id

    @property
    def node(self) -> ClusterNode:
        assert self.state.node is not None, "only what has a node is done there"
        return self.state.node

    def apply(self, event: Event) -> None:
        self.state = apply(self.state, event)


class PlacedJobs:
    """Jobs by id, and what drives them. Belongs to one event loop."""

    def __init__(
        self,
        scheduler: ClusterScheduler,
        place: Callable[[], None],
        failed: Callable[[JobEvent], None],
    ) -> None:
        """Begin without jobs.

        Args:
            scheduler: The cluster's queue.
            place: Places what waits; calls `assigned` for each job that gets a node.
            failed: Called with the failure of a job that its node has refused late.
        """
        self._scheduler = scheduler
        self._place = place
        self._failed = failed
        self._jobs: dict[str, _Job] = {}
        self._trained: dict[str, AdapterRef] = {}  # by name, the oldest first
        self._starts: set[asyncio.Task[None]] = set()

    # -- questions ------------------------------------------------------------------

    def on(self, node: ClusterNode | None) -> list[str]:
        """Return the ids of a node's jobs; None: of those without a node."""
        return [id for id, job in self._jobs.items() if job.state.node is node]

    def is_on(self, id: str, node: ClusterNode) -> bool:
        """Return whether a job is a node's."""
        return self.node_of(id) is node

    def node_of(self, id: str) -> ClusterNode | None:
        """Return a job's node; None: it has none yet, or is not known."""
        job = self._jobs.get(id)
        return None if job is None else job.state.node

    def is_shard(self, id: str) -> bool:
        """Return whether a job is a shard of another one."""
        job = self._jobs.get(id)
        return job is not None and job.state.start.shard is not None

    def nodes_training(self, adapter: str) -> set[ClusterNode] | None:
        """Return the nodes that train an adapter, none while its job moves; None: no job does."""
        jobs = [job.state for job in self._jobs.values() if job.state.start.name == adapter]
        return {job.sent_to for job in jobs if job.sent_to is not None} if jobs else None

    def trained(self, adapter: str) -> AdapterRef | None:
        """Return the adapter of a job that has succeeded lately; None: there is none."""
        return self._trained.get(adapter)

    # -- requests -------------------------------------------------------------------

    async def start(self, job: JobStart, *, excluded: frozenset[str] = frozenset()) -> None:
        """Start a job as `JobEngine` does; one that has to wait for a node counts as started, too.

        Args:
            job: The job.
            excluded: Names of nodes where it cannot go.
        """
        state = PlacedJob(start=job, excluded=excluded, rests=job.paused)
        started = self._jobs[job.id] = _Job(state=state)
        # The job trains the adapter of this name again.
        self._trained.pop(job.name, None)
        async with started.turn:
            await self._advance(started, raises=True)

    async def have_begun(self, ids: Collection[str], limit_s: float) -> None:
        """Wait until nodes have answered the starts of these jobs, or for this time."""
        jobs = [self._jobs[id] for id in ids if id in self._jobs]
        if starts := [job.late_start for job in jobs if job.late_start is not None]:
            await asyncio.wait(starts, timeout=limit_s)

    async def pause(self, id: str) -> None:
        """Pause a job as `JobEngine` does."""
        await self._request(id, ChangeRequested(desired="rest"))

    async def resume(self, id: str) -> None:
        """Resume a job as `JobEngine` does."""
        await self._request(id, ChangeRequested(desired="run"))

    async def cancel(self, id: str, *, keeps: bool = True) -> None:
        """Cancel a job as `JobEngine` does. keeps: whether it leaves a checkpoint."""
        await self._request(id, ChangeRequested(desired="end", keeps=keeps))

    async def move(self, id: str) -> bool:
        """Have a job leave its node, which drains, and continue on another one after its optimizer
        step.

        Returns:
            False if no node has the job any more and it is to be started again: its checkpoint
            could not be written, or the next node refused it. True otherwise; also if the job is
            over or a node has died, which is reported elsewhere.
        """
        try:
            job = await self._request(id, ChangeRequested(desired="move"), raises=True)
        except (JobOverError, EngineGoneError):
            return True
        except CoserveError as error:
            _log.error("job %s cannot continue on another node: %s", id, error)
            return False
        return not job.state.is_lost

    async def _request(self, id: str, request: ChangeRequested, *, raises: bool = False) -> _Job:
        async with self._turn(id) as job:
            job.apply(request)
            try:
                await self._advance(job, raises=raises)
            finally:
                job.apply(RequestClosed())
            return job

    @asynccontextmanager
    async def _turn(self, id: str) -> AsyncIterator[_Job]:
        """Wait for a job's turn; JobOverError if it is over by then."""
        over = JobOverError(f"no node has the job {id!r}: it is over, or was never started")
        if (job := self._jobs.get(id)) is None:
            raise over
        async with job.turn:
            # Meanwhile the job may have ended and been started anew under the same id.
            if self._jobs.get(id) is not job:
                raise over
            yield job

    # -- what happens to jobs -------------------------------------------------------

    def assigned(self, id: str, node: ClusterNode) -> None:
        """Note that a job has a node, and send it there when the job's turn comes."""
        if (job := self._jobs.get(id)) is not None:
            job.apply(NodeAssigned(node))
            # In a task of its own: the caller is placing tasks, and cannot wait for the node.
            start = job.late_start = asyncio.create_task(self._start_late(job))
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    def reported(self, report: JobEvent | Checkpointed) -> None:
        """Note the step or the checkpoint of a job that its node has reported."""
        if (job := self._jobs.get(report.job)) is not None:
            job.apply(report)

    def ended(self, event: JobEvent) -> None:
        """Drop a job whose end its node has reported, after its last checkpoint."""
        job = self._jobs.get(event.job)
        if job is not None and job.state.checkpoint is not None and event.kind == "succeeded":
            self.keep(AdapterRef(name=job.state.start.name, directory=job.state.checkpoint))
        self.forget(event.job)

    def keep(self, adapter: AdapterRef) -> None:
        """Remember the adapter of a job that has succeeded."""
        self._trained[adapter.name] = adapter
        if len(self._trained) > _MAX_TRAINED:
            del self._trained[next(iter(self._trained))]

    def forget(self, id: str) -> None:
        """Drop a job that is over; no error if it is not known."""
        if (job := self._jobs.pop(id, None)) is not None:
            self._withdraw(job)

    def lose(self, node: ClusterNode) -> list[str]:
        """Drop the jobs of a node whose engine has died, and return their ids."""
        lost = self.on(node)
        for id in lost:
            # Not withdrawn: the scheduler has removed the node with its tasks already.
            del self._jobs[id]
        return lost

    def close(self) -> None:
        """Start nothing any more."""
        for start in self._starts:
            start.cancel()

    # -- the driver -----------------------------------------------------------------

    async def _start_late(self, job: _Job) -> None:
        async with job.turn:
            await self._advance(job)

    async def _advance(self, job: _Job, *, raises: bool = False) -> None:
        """Do what the plan says until there is nothing left to do, or only to wait.

        Args:
            job: The job, whose turn the caller has.
            raises: Whether the refusal of its start is raised; otherwise it is reported.
        """
        # The job may be dropped while an action waits for its node.
        while self._jobs.get(job.id) is job and (action := plan(job.state)) is not None:
            await self._do(action, job, raises=raises)

    async def _do(self, action: Action, job: _Job, *, raises: bool) -> None:
        """Do one action, and apply what follows from it."""
        match action:
            case "submit":
                job.apply("submit")
                self._scheduler.submit(task_of_job(job.state.start, excluded=job.state.excluded))
                self._place()
            case "withdraw":
                self._withdraw(job)
                job.apply("withdraw")
            case "start":
                await self._start(job, raises=raises)
            case "pause" | "park":
                await self._pause(job, action)
            case "resume":
                await job.node.link.resume_job(job.id)
                job.apply("resume")
            case "cancel":
                await self._cancel(job)
            case "leave":
                await self._leave(job)
            case "forget":
                self.forget(job.id)

    async def _start(self, job: _Job, *, raises: bool) -> None:
        # Before the answer, since reports of the job may overtake it.
        job.apply("start")
        try:
            await job.node.link.start_job(job.state.start)
        except EngineGoneError:  # the node's end is reported elsewhere
            if raises:
                raise
        except CoserveError as error:
            self.forget(job.id)
            if raises:
                raise
            self._failed(failure_of(job.id, error))

    async def _pause(self, job: _Job, action: Literal["pause", "park"]) -> None:
        try:
            await job.node.link.pause_job(job.id)  # its checkpoint is reported before this returns
        except CoserveError as error:
            if action == "pause" or isinstance(error, JobOverError | EngineGoneError):
                raise
            _log.error("job %s cannot be paused: %s", job.id, error)
            job.apply(CheckpointFailed())
        else:
            job.apply(action)

    async def _cancel(self, job: _Job) -> None:
        request = job.state.requested
        try:
            await job.node.link.cancel_job(job.id, keeps=request is None or request.keeps)
        except EngineGoneError:
            if self._jobs.get(job.id) is job:  # else its end was reported before the node died
                raise
        job.apply("cancel")

    async def _leave(self, job: _Job) -> None:
        link = job.node.link
        self._withdraw(job)
        job.apply("leave")
        with suppress(CoserveError):  # what the old node reports from now on is dropped
            await link.cancel_job(job.id, keeps=False)
        if job.state.is_lost:
            _log.error(
                "job %s has no checkpoint of its last steps: it restarts from the one before it",
                job.id,
            )

    def _withdraw(self, job: _Job) -> None:
        """Have the scheduler drop a job, whether it waits or has a node."""
        # False: it does not wait any more, so its place on the node is given back.
        if not self._scheduler.withdraw(job.id):
            self._scheduler.finish(job.id)


def failure_of(id: str, error: CoserveError) -> JobEvent:
    """Return the event of a job, or of a shard, that fails with an error."""
    return JobEvent(job=id, kind="failed", step=0, now_s=time.monotonic(), message=str(error))
