"""The jobs of a cluster: each on one node, or waiting for one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from coserve.cluster.jobs.placed_job import (
    CheckpointTold,
    Event,
    Moved,
    Placed,
    PlacedJob,
    RestChanged,
    StartAwaited,
    StartSent,
    StepTold,
    TakenBack,
    apply,
)
from coserve.cluster.nodes.registry import ClusterNode
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.tasks import task_of_job
from coserve.engine.commands import AdapterRef, JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.errors import CoserveError, EngineGoneError, JobOverError
from coserve.jobs.messages import Checkpointed

_log = logging.getLogger(__name__)

# Adapters of jobs that have succeeded, until the catalogue, which asks for them, has heard of that.
_MOST_MADE = 100


@dataclass(kw_only=True, eq=False)
class _Job:
    """A job that was started, and what this process does for it."""

    state: PlacedJob
    # Of one that has got its node after `start` had returned.
    late_start: "asyncio.Task[None] | None" = None
    # Of those who change it.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def node(self) -> ClusterNode | None:
        return self.state.node

    def apply(self, event: Event) -> None:
        """Have an event change the job."""
        self.state = apply(self.state, event)


class ClusterJobs:
    """Belongs to one event loop."""

    def __init__(
        self,
        scheduler: ClusterScheduler,
        place: Callable[[], None],
        failed: Callable[[JobEvent], None],
    ) -> None:
        """place: places what waits; see `placed`. failed: told of a job that no node took in the
        end.
        """
        self._scheduler, self._place, self._failed = scheduler, place, failed
        self._jobs: dict[str, _Job] = {}
        self._made: dict[str, AdapterRef] = {}  # by name, the oldest first
        self._starts: set[asyncio.Task[None]] = set()

    # -- questions ------------------------------------------------------------------

    def on(self, node: ClusterNode | None) -> list[str]:
        """Those of a node; None: those that wait for one."""
        return [id for id, job in self._jobs.items() if job.node is node]

    def is_on(self, id: str, node: ClusterNode) -> bool:
        """Whether a job is a node's."""
        found = self._jobs.get(id)
        return found is not None and found.node is node

    def node_of(self, id: str) -> ClusterNode | None:
        """Where a job is; None: nowhere yet, or it is not known."""
        found = self._jobs.get(id)
        return None if found is None else found.node

    def is_shard(self, id: str) -> bool:
        """Whether it is a part of another job."""
        found = self._jobs.get(id)
        return found is not None and found.state.start.shard is not None

    def makers(self, adapter: str) -> set[ClusterNode] | None:
        """Nodes that have been told to make an adapter, none while its job moves; None: no job
        makes it.
        """
        jobs = [job.state for job in self._jobs.values() if job.state.start.name == adapter]
        return {job.told for job in jobs if job.told is not None} if jobs else None

    def made(self, adapter: str) -> AdapterRef | None:
        """Where an adapter lies that a job has made, which has succeeded of late; None: there is
        none.
        """
        return self._made.get(adapter)

    # -- what is asked of them ------------------------------------------------------------

    async def start(self, job: JobStart, *, excluded: frozenset[str] = frozenset()) -> None:
        """See `JobEngine`; one that must wait for a node has been taken, too. excluded: nodes where
        it cannot go.
        """
        started = self._jobs[job.id] = _Job(
            state=PlacedJob(start=job, excluded=excluded, rests=job.paused)
        )
        self._made.pop(job.name, None)
        self._scheduler.submit(task_of_job(job, excluded=excluded))
        self._place()
        await self._start_when_placed(started)

    async def have_begun(self, ids: Collection[str], limit_s: float) -> None:
        """Wait until nodes have answered those that were placed on them when `start` had returned,
        or for this time.
        """
        jobs = [self._jobs[id] for id in ids if id in self._jobs]
        if starts := [job.late_start for job in jobs if job.late_start is not None]:
            await asyncio.wait(starts, timeout=limit_s)

    async def pause(self, id: str) -> None:
        """See `JobEngine`."""
        async with self._turn(id) as job:
            if (node := job.state.told) is not None:
                await node.link.pause_job(id)
            else:
                self._take_back(job)
            job.apply(RestChanged(rests=True))

    async def resume(self, id: str) -> None:
        """See `JobEngine`."""
        async with self._turn(id) as job:
            rested = job.state.rests
            job.apply(RestChanged(rests=False))
            if (node := job.state.told) is not None:
                await node.link.resume_job(id)
            elif rested:
                self._place_anew(job)

    async def cancel(self, id: str, *, keeps: bool = True) -> None:
        """See `JobEngine`. keeps: a checkpoint."""
        async with self._turn(id) as job:
            try:
                if (node := job.state.told) is not None:
                    await node.link.cancel_job(id, keeps=keeps)
            except EngineGoneError:
                if self._jobs.get(id) is job:  # else its end was told before the node died
                    raise
            self.forget(id)

    async def move(self, id: str) -> bool:
        """Have a job continue on another node than its own, which drains, from where it is after
        its optimizer step. True, too, if it is over by then, or its node has died: then it is
        started anew by those who are told so. False: no node has it any more, and it is to be
        started anew, since its checkpoint could not be written, or it was refused where it was to
        continue.
        """
        try:
            async with self._turn(id) as job:
                return await self._move(job, id)
        except JobOverError:
            return True

    async def _move(self, job: _Job, id: str) -> bool:
        old = job.state.told
        if old is None:
            if job.node is not None:
                self._place_anew(job)
            return True
        is_kept = True
        try:
            await old.link.pause_job(id)  # its checkpoint has been told before this returns
        except (JobOverError, EngineGoneError):
            return True
        except CoserveError as error:
            _log.error("job %s cannot be paused: %s", id, error)
            is_kept = False
        if self._jobs.get(id) is not job:
            return True
        # Steps that no checkpoint has are forgotten where all of it is known, before they are made
        # again.
        is_kept = is_kept and job.state.is_kept
        self._take_back(job)
        with suppress(CoserveError):  # what it would say is of no interest any more
            await old.link.cancel_job(id, keeps=False)
        if not is_kept:
            _log.error(
                "job %s has no checkpoint of its last steps: it is started anew, from the one "
                "before",
                id,
            )
            self.forget(id)
            return False
        job.apply(Moved())
        self._scheduler.submit(task_of_job(job.state.start))
        self._place()
        try:
            await self._start_when_placed(job)
        except EngineGoneError:  # which is told with the node's end
            return True
        except CoserveError as error:
            _log.error("job %s cannot continue on another node: %s", id, error)
            return False
        return True

    # -- what becomes of them -------------------------------------------------------------

    def placed(self, id: str, node: ClusterNode) -> None:
        """A job has a node."""
        if (job := self._jobs.get(id)) is None:
            return
        job.apply(Placed(node=node))
        if job.state.is_late:
            start = job.late_start = asyncio.create_task(self._start_late(job, node))
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    def stepped(self, event: JobEvent) -> None:
        """Its node has told of a job how far it is."""
        if (job := self._jobs.get(event.job)) is not None:
            job.apply(StepTold(step=event.step))

    def checkpointed(self, found: Checkpointed) -> None:
        """A checkpoint of a job is on disk."""
        if (job := self._jobs.get(found.job)) is not None:
            job.apply(CheckpointTold(directory=found.directory, step=found.step))

    def ended(self, event: JobEvent) -> None:
        """Its node has told its end, and its last checkpoint before."""
        job = self._jobs.get(event.job)
        if job is not None and job.state.checkpoint is not None and event.kind == "succeeded":
            self.keep(AdapterRef(name=job.state.start.name, directory=job.state.checkpoint))
        self.forget(event.job)

    def keep(self, adapter: AdapterRef) -> None:
        """A job has succeeded, which made this."""
        self._made[adapter.name] = adapter
        if len(self._made) > _MOST_MADE:
            del self._made[next(iter(self._made))]

    def forget(self, id: str) -> None:
        """It is over; no error if it was not there."""
        if (job := self._jobs.pop(id, None)) is not None:
            self._take_back(job)

    def lose(self, node: ClusterNode) -> list[str]:
        """A node's engine has died; those that it had."""
        lost = self.on(node)
        for id in lost:
            del self._jobs[id]
        return lost

    def close(self) -> None:
        """Nothing waits any more."""
        for start in self._starts:
            start.cancel()

    def _take_back(self, job: _Job) -> None:
        """It has no node any more, and waits for none."""
        job.apply(TakenBack())
        if not self._scheduler.withdraw(job.state.start.id):
            self._scheduler.finish(job.state.start.id)

    def _place_anew(self, job: _Job) -> None:
        """One that no node knows of."""
        self._take_back(job)
        self._scheduler.submit(task_of_job(job.state.start, excluded=job.state.excluded))
        self._place()

    async def _start_when_placed(self, job: _Job) -> None:
        """Now, or as soon as it has a node (see `placed`)."""
        if job.node is None:
            job.apply(StartAwaited())
        else:
            await self._start_on(job, job.node)

    async def _start_on(self, job: _Job, node: ClusterNode) -> None:
        job.apply(StartSent())
        try:
            await node.link.start_job(job.state.start)
        except EngineGoneError:  # which is told with the node's end
            raise
        except CoserveError:
            self.forget(job.state.start.id)
            raise

    async def _start_late(self, job: _Job, node: ClusterNode) -> None:
        """What is wrong with it is told as an event."""
        id = job.state.start.id
        if self._jobs.get(id) is not job or job.state.is_sent or job.node is not node:
            return  # it was changed in between
        try:
            await self._start_on(job, node)
        except EngineGoneError:
            return
        except CoserveError as error:
            self._failed(
                JobEvent(job=id, kind="failed", step=0, now_s=time.monotonic(), message=str(error))
            )

    @asynccontextmanager
    async def _turn(self, id: str) -> AsyncIterator[_Job]:
        """Of who changes a job. JobOverError if it is over by then."""
        over = JobOverError(f"no node has the job {id!r}: it is over, or was never started")
        if (job := self._jobs.get(id)) is None:
            raise over
        async with job.turn:
            if self._jobs.get(id) is not job:
                raise over
            yield job
