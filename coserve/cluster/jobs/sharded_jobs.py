"""Driver of a cluster's jobs, and of those among them that are divided into shards: events in,
`apply`, `plan`, and the planned actions (`coserve.cluster.jobs.sharded_job`).

A divided job has as many shards as it asks for, or as there are nodes; each is a job of its own to
`PlacedJobs`. Shards exchange what they have learned (`coserve.tuning.shard`) by files. When a node
dies, or is to leave, all shards end, and the manager starts the job again from its newest
checkpoint, on the nodes that are there; likewise when another node joins and the job has too few.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from coserve.cluster.jobs.changed_weights import ChangedWeights
from coserve.cluster.jobs.placed_job import ChangeRequested
from coserve.cluster.jobs.placed_jobs import PlacedJobs, failure_of
from coserve.cluster.jobs.sharded_job import (
    SLOW,
    Action,
    Combine,
    Discard,
    Event,
    JobReport,
    Report,
    ShardContributed,
    ShardedJob,
    ShardReported,
    StartRefused,
    apply,
    plan,
)
from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import AdapterRef, JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.errors import CoserveError, EngineGoneError, JobOverError
from coserve.jobs.files.folders import contributions_beside
from coserve.jobs.files.shared_files import SharedFiles
from coserve.jobs.lifecycle.events import DesiredState, RequestClosed
from coserve.jobs.messages import Contributed
from coserve.tuning.shard import Combination, DataParallel, Shard

_WAIT_S = 0.05
# Time for nodes to come as far as the one whose checkpoint is on disk.
_CATCH_UP_S = 10.0


@dataclass(kw_only=True, eq=False)
class _Job:
    """A divided job, and what this process does for it."""

    state: ShardedJob
    """The job itself."""
    done: list[ClusterNode] = field(default_factory=list)
    """Nodes, other than the first, that have made all of the job."""
    starts: "list[asyncio.Task[None]]" = field(default_factory=list)
    """Starts of all shards but the first."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a task changes the job."""

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def shards(self) -> list[str]:
        return self.state.shards

    @property
    def have_shards_begun(self) -> bool:
        all_started = self.state.num_started == self.state.num_shards
        return all_started and all(start.done() for start in self.starts)

    def apply(self, event: Event) -> None:
        self.state = apply(self.state, event)


class ShardedJobs:
    """All jobs of a cluster, as the manager sees them. Implements `JobEngine`; belongs to one event
    loop.
    """

    def __init__(
        self,
        jobs: PlacedJobs,
        nodes: Callable[[], Collection[ClusterNode]],
        report: Callable[[JobReport], None],
        lost: Callable[[frozenset[str]], None],
        shared: SharedFiles | None = None,
    ) -> None:
        """Begin without jobs.

        Args:
            jobs: Jobs on one node each, shards among them.
            nodes: Returns the nodes that jobs may have now.
            report: Called with what is known of a shard beside its node's reports.
            lost: Called with the ids of jobs that no node has any more.
            shared: Where contributions lie (default: on a disk that nodes share).
        """
        self._jobs = jobs
        self._nodes = nodes
        self._report = report
        self._lost = lost
        self._shared = shared or SharedFiles()
        self._weights = ChangedWeights()
        self._sharded: dict[str, _Job] = {}
        self._of: dict[str, tuple[_Job, int]] = {}  # job and number of a shard
        self._leaving: dict[str, asyncio.Task[None]] = {}  # by job: its last shards are being ended
        self._tasks: set[asyncio.Task[None]] = set()

    # -- questions ------------------------------------------------------------------

    def job_of(self, id: str) -> str:
        """Return the id of the job that a shard is part of; any other job is its own."""
        return self._of[id][0].id if id in self._of else id

    def changed_by(self) -> JobStart | None:
        """Return the job whose weights a fresh engine has to load: `ChangedWeights.changed_by`."""
        return self._weights.changed_by(has_others=bool(self._nodes()))

    # -- requests of the manager ----------------------------------------------------

    async def start_job(self, job: JobStart) -> None:
        """Start a job; one that has to wait for nodes counts as started, too."""
        if (asked := self._weights.asked(job)) is None:
            await self._jobs.start(job)
            return
        if (leaving := self._leaving.get(job.id)) is not None:
            # Nodes must have dropped the shards of the last attempt before they get others.
            await asyncio.wait([leaving])
        sharded = self._divide(job, asked)
        try:
            async with sharded.turn:
                await self._advance(sharded)
        except EngineGoneError:  # the node's end is reported elsewhere
            raise
        except CoserveError:
            sharded.apply(StartRefused())
            await self._leave(sharded)
            raise

    async def pause_job(self, id: str) -> None:
        """Pause a job."""
        await self._request(id, "rest", self._jobs.pause)

    async def resume_job(self, id: str) -> None:
        """Resume a job."""
        await self._request(id, "run", self._jobs.resume)

    async def cancel_job(self, id: str) -> None:
        """Cancel a job."""
        await self._request(id, "end", self._jobs.cancel)

    async def _request(
        self,
        id: str,
        desired: DesiredState | Literal["move"],
        ask_undivided: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        if (job := self._sharded.get(id)) is None:
            await ask_undivided(id)
            return
        async with job.turn:
            job.apply(ChangeRequested(desired=desired))
            try:
                await self._advance(job)
            finally:
                job.apply(RequestClosed())
                self._settle(job)
            if job.state.has_left and desired in ("rest", "run"):
                raise JobOverError(f"no node has the job {id!r}: it is over, or starts again")

    # -- nodes that come and go -----------------------------------------------------

    async def leave(self, node: ClusterNode) -> None:
        """Have the jobs of a node that drains continue on others."""
        jobs = {self.job_of(id) for id in self._jobs.on(node)}
        await asyncio.gather(*(self._request(id, "move", self._move) for id in jobs))

    async def _move(self, id: str) -> None:
        if not await self._jobs.move(id):
            self._lost(frozenset({id}))

    def grow(self) -> None:
        """Have jobs with too few shards begin again, since another node has joined."""
        for job in list(self._sharded.values()):
            start, asked = job.state.start, job.state.asked
            if len(job.shards) < self._weights.number(start, asked, len(self._nodes())):
                self._soon(self._request(job.id, "move", self._move))

    def lose(self, node: ClusterNode) -> frozenset[str]:
        """Drop the jobs of a node whose engine has died, and return their ids."""
        lost = {self.job_of(id) for id in self._jobs.lose(node)}
        for job in list(self._sharded.values()):
            # A shard that waits for a node can wait for ever if there are fewer nodes than shards.
            waits = None in self._nodes_of(job)
            if job.id in lost or (waits and len(job.shards) > len(self._nodes())):
                lost.add(job.id)
                self._leave(job)
        return frozenset(lost)

    async def checkpoint_all(self) -> None:
        """Pause all jobs, with checkpoints, at the end."""
        jobs = {self.job_of(id) for node in self._nodes() for id in self._jobs.on(node)}
        await asyncio.gather(*map(self.pause_job, jobs), return_exceptions=True)

    def close(self) -> None:
        """Start nothing any more."""
        self._jobs.close()
        for task in self._tasks:
            task.cancel()

    # -- what is reported -----------------------------------------------------------

    def assigned(self, id: str, node: ClusterNode) -> None:
        """Note that a job or a shard has a node."""
        self._jobs.assigned(id, node)
        if id in self._of:
            self._settle(self._of[id][0])

    def take(self, report: JobReport) -> list[JobReport]:
        """Return the reports on whole jobs that follow from a report, in order; none for a shard
        that was given up.
        """
        if report.job not in self._of:
            return [] if self._jobs.is_shard(report.job) else [report]
        job, number = self._of[report.job]
        if isinstance(report, JobEvent) and report.kind == "succeeded" and number:
            node = self._jobs.node_of(report.job)
            job.done += [] if node is None else [node]
        job.apply(ShardReported(shard=number, report=report))
        return self._settle(job)

    def contributed(self, contributed: Contributed) -> None:
        """Note that a node has written its contribution for the others."""
        if contributed.job in self._of:
            job, number = self._of[contributed.job]
            job.apply(ShardContributed(shard=number, contributed=contributed))
            self._settle(job)

    # -- the driver -----------------------------------------------------------------

    def _settle(self, job: _Job) -> list[JobReport]:
        """Do what the plan says as far as it is quick, and return reports of the whole job."""
        reports: list[JobReport] = []
        while (action := self._plan(job)) is not None and action not in SLOW:
            self._do_at_once(action, job)
            reports += [action.report] if isinstance(action, Report) else []
        return reports

    async def _advance(self, job: _Job) -> None:
        """Do what the plan says until there is nothing left to do, or only to wait. The caller has
        the job's turn.
        """
        while (action := self._plan(job)) is not None:
            if action in SLOW:
                await self._do(action, job)
                job.apply(action)
            else:
                self._do_at_once(action, job)

    def _plan(self, job: _Job) -> Action | None:
        return plan(
            job.state, [None if node is None else node.name for node in self._nodes_of(job)]
        )

    async def _do(self, action: Action, job: _Job) -> None:
        match action:
            case "start first":
                await self._start_shard(job, 0)
            case "await starts":
                await _until(lambda: job.have_shards_begun)
                await self._jobs.have_begun(job.shards, _CATCH_UP_S)
            case "await reports":
                await _until(lambda: not job.state.is_holding)
            case "pause first":
                await self._pause(job, job.shards[:1])
            case "pause others":
                await self._pause(job, job.shards[1:])
            case "resume":
                await self._all(job.shards, self._jobs.resume)
            case "cancel":
                await self._cancel(job)
            case "regroup":
                await self._leave(job)
                self._lost(frozenset({job.id}))

    def _do_at_once(self, action: Action, job: _Job) -> None:
        # Read before the action is applied, which counts the shard as started.
        number = job.state.num_started
        job.apply(action)
        match action:
            case "start next":
                job.starts.append(self._soon(self._start_late(job, number)))
            case "leave":
                self._leave(job)
            case "finish":
                self._finish(job)
            case Combine(shard=shard, combination=combination):
                self._soon(self._combine(job, shard, combination))
            case Discard(directories=directories):
                self._soon(asyncio.to_thread(self._discard_all, directories))

    # -- shards ---------------------------------------------------------------------

    def _divide(self, job: JobStart, asked: DataParallel) -> _Job:
        attempt, count = uuid4().hex[:8], self._weights.number(job, asked, len(self._nodes()))
        self._weights.begin(job)
        sharded = _Job(state=ShardedJob.begin(job, asked, num_shards=count, attempt=attempt))
        self._sharded[job.id] = sharded
        self._of.update({shard: (sharded, number) for number, shard in enumerate(sharded.shards)})
        return sharded

    async def _start_shard(self, job: _Job, number: int) -> None:
        """Start a shard on a node of its own."""
        state, whole = job.state, job.state.start
        shard = Shard(
            job=job.id,
            index=number,
            count=state.num_shards,
            synchronization=state.asked.synchronization,
            every_steps=state.asked.every_steps,
            # Shards meet where the whole job writes checkpoints.
            meet_every_steps=whole.checkpoint_every_steps,
            directory=str(contributions_beside(Path(whole.checkpoints)) / state.attempt),
        )
        start = replace(
            whole,
            id=job.shards[number],
            # The first shard alone evaluates the job.
            validation=whole.validation if number == 0 else None,
            shard=shard,
            paused=state.rests,
            checkpoint=state.checkpoint,
        )
        # No two shards may share a node.
        siblings = self._nodes_of(job)[:number]
        excluded = frozenset(node.name for node in siblings if node is not None)
        await self._jobs.start(start, excluded=excluded)

    async def _start_late(self, job: _Job, number: int) -> None:
        """Start a shard that nobody waits for: what is wrong with it is reported as an event."""
        if job.state.has_left:
            return
        try:
            await self._start_shard(job, number)
        except EngineGoneError:  # the node's end is reported elsewhere
            return
        except CoserveError as error:
            self._fail(job, number, error)

    async def _combine(self, job: _Job, number: int, combination: Combination) -> None:
        shard = job.shards[number]
        node = self._jobs.node_of(shard)
        # The job has left its nodes since the contribution arrived.
        if node is None or shard not in self._of:
            return
        try:
            await node.link.combine(shard, combination)
        except (EngineGoneError, JobOverError):
            return
        except CoserveError as error:
            self._fail(job, number, error)

    def _fail(self, job: _Job, number: int, error: CoserveError) -> None:
        # A later attempt of the same job has other shards.
        if self._sharded.get(job.id) is job:
            self._report(failure_of(job.shards[number], error))

    async def _pause(self, job: _Job, shards: Sequence[str]) -> None:
        try:
            await self._all(shards, self._jobs.pause)
        except CoserveError:
            if job.state.requested != "move":  # else the job leaves its nodes all the same
                raise

    async def _cancel(self, job: _Job) -> None:
        nodes = self._nodes_of(job)
        await self._all(job.shards, self._jobs.cancel)
        self._forget(job)
        await self._undo(job, nodes)
        # Reported last, when every shard has ended and the engines are fresh again.
        if job.state.end is not None:
            self._report(job.state.end)

    def _leave(self, job: _Job) -> "asyncio.Task[None]":
        """End all shards; others of the same job wait for that."""
        self._forget(job)
        ending = self._leaving[job.id] = self._soon(self._end_shards(job, self._nodes_of(job)))
        ending.add_done_callback(
            # A later attempt may have replaced the entry.
            lambda _: self._leaving.get(job.id) is ending and self._leaving.pop(job.id)
        )
        return ending

    def _forget(self, job: _Job) -> None:
        """Give up a job's shards: what they report from now on is dropped."""
        job.apply("leave")
        if self._sharded.get(job.id) is job:
            del self._sharded[job.id]
        for shard in job.shards:
            self._of.pop(shard, None)

    async def _end_shards(self, job: _Job, nodes: Sequence[ClusterNode | None]) -> None:
        """End all shards, so that their nodes can have others of the same job."""
        ends = [self._jobs.cancel(shard, keeps=False) for shard in job.shards]
        await asyncio.gather(*ends, return_exceptions=True)
        for shard in job.shards:
            self._jobs.forget(shard)
        if job.state.is_over:
            await self._undo(job, nodes)

    def _nodes_of(self, job: _Job) -> list[ClusterNode | None]:
        return [self._jobs.node_of(shard) for shard in job.shards]

    async def _undo(self, job: _Job, nodes: Sequence[ClusterNode | None]) -> None:
        """Restart the engines of a job that has trained the serving weights and has not succeeded:
        each node has other weights now, and a fresh engine has the model's own.
        """
        if job.state.start.changes_model:
            self._weights.undo(job.state.start)
            ends = [node.connection.end(0.0) for node in nodes if node is not None]
            await asyncio.gather(*ends)

    def _finish(self, job: _Job) -> None:
        """Drop a job that has succeeded. What it has made lies on disk, so that nodes may let go of
        it when they have no room.
        """
        self._weights.keep(job.state.start, job.state.checkpoint)
        if job.state.checkpoint is not None:
            adapter = AdapterRef(name=job.state.start.name, directory=job.state.checkpoint)
            self._jobs.keep(adapter)
            for node in job.done:
                self._soon(_load(node, adapter))
        self._forget(job)

    async def _all(
        self, shards: Collection[str], do: Callable[[str], Coroutine[Any, Any, None]]
    ) -> None:
        """Do something with shards. Raises what one of them raised; JobOverError only if all are
        over.
        """
        outcomes = await asyncio.gather(*map(do, shards), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not isinstance(error, JobOverError) or len(errors) == len(shards):
                raise error

    def _discard_all(self, directories: Sequence[str]) -> None:
        for directory in directories:
            self._shared.discard(Path(directory))

    def _soon(self, do: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(do)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, but not for long."""
    left_s = _CATCH_UP_S
    while not is_so() and left_s > 0:
        await asyncio.sleep(_WAIT_S)
        left_s -= _WAIT_S


async def _load(node: ClusterNode, adapter: AdapterRef) -> None:
    with suppress(CoserveError):  # it is read when it is asked for
        await node.link.load_adapter(adapter)
