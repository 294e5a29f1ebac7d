"""Jobs on nodes, those among them that are divided: each node has a shard, a job of its own to
`ClusterJobs`.

A divided job is as many shards as it asks for, or as there are nodes. They exchange what they have
learned (`coserve.tuning.shard`) by files; this passes on who has written what, and tells what they
report as if one node had the whole job. When a node dies, or is to leave, all shards end, and the
manager starts the job again from its newest checkpoint, on the nodes that are there; likewise when
there is a node more for a job that has too few.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from coserve.cluster.jobs.changed_weights import ChangedWeights
from coserve.cluster.jobs.placed_jobs import ClusterJobs
from coserve.cluster.jobs.sharded_job import (
    EndChanged,
    Event,
    Outcome,
    RestChanged,
    ShardContributed,
    ShardedJob,
    ShardReported,
    Told,
    apply,
)
from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import AdapterRef, JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.errors import CoserveError, EngineGoneError, JobOverError
from coserve.jobs.files.folders import contributions_beside
from coserve.jobs.files.shared_files import SharedFiles
from coserve.jobs.messages import Contributed
from coserve.tuning.shard import Combination, DataParallel, Shard

_log = logging.getLogger(__name__)

_WAIT_S = 0.05
# For nodes to come as far as the one whose checkpoint is on disk.
_CATCH_UP_S = 10.0


@dataclass(kw_only=True, eq=False)
class _Divided:
    """A job whose shards have been started, and what this process does for it."""

    state: ShardedJob
    # Nodes, other than the first, that have made all of it.
    done: list[ClusterNode] = field(default_factory=list)
    starts: "Sequence[asyncio.Task[None]]" = ()
    # Of those who change it.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def shards(self) -> list[str]:
        return self.state.shards

    def apply(self, event: Event) -> Outcome:
        """Have an event change the job; returns what is to be done."""
        outcome = apply(self.state, event)
        self.state = outcome.state
        return outcome


class DividedJobs:
    """Implements `JobEngine`; belongs to one event loop."""

    def __init__(
        self,
        jobs: ClusterJobs,
        nodes: Callable[[], Collection[ClusterNode]],
        tell: Callable[[Told], None],
        lost: Callable[[frozenset[str]], None],
        shared: SharedFiles | None = None,
    ) -> None:
        """jobs: on one node each. nodes: that jobs may have now. tell: is told what is known of a
        shard beside its node's reports. lost: is told of jobs that no node has any more. shared:
        where contributions are (default: on a disk that nodes share).
        """
        self._jobs, self._nodes, self._tell, self._lost = jobs, nodes, tell, lost
        self._shared = shared or SharedFiles()
        self._weights = ChangedWeights()
        self._divided: dict[str, _Divided] = {}
        self._of: dict[str, tuple[_Divided, int]] = {}  # job and number of a shard
        self._leaving: dict[str, asyncio.Task[None]] = {}  # by job: its last shards are being ended
        self._tasks: set[asyncio.Task[None]] = set()

    # -- questions ------------------------------------------------------------------

    def job_of(self, id: str) -> str:
        """The job that a shard is of; any other is its own."""
        return self._of[id][0].id if id in self._of else id

    def changed_by(self) -> JobStart | None:
        """See `ChangedWeights.changed_by`."""
        return self._weights.changed_by(has_others=bool(self._nodes()))

    # -- what the manager asks ----------------------------------------------------------

    async def start_job(self, job: JobStart) -> None:
        """See `JobEngine`; one that must wait for nodes has been taken, too."""
        if (asked := self._weights.asked(job)) is None:
            await self._jobs.start(job)
            return
        if (leaving := self._leaving.get(job.id)) is not None:
            await asyncio.wait([leaving])
        divided = self._divide(job, asked)
        async with divided.turn:
            try:
                await self._start_shard(divided, 0)
            except EngineGoneError:  # which is told with the node's end
                raise
            except CoserveError:
                divided.apply(EndChanged(is_over=True))
                await self._leave(divided)
                raise
        divided.starts = [
            self._soon(self._start_later(divided, number))
            for number in range(1, len(divided.shards))
        ]

    async def pause_job(self, id: str) -> None:
        """See `JobEngine`."""
        if (job := self._divided.get(id)) is None:
            await self._jobs.pause(id)
            return
        async with job.turn:
            await self._rest(job)

    async def resume_job(self, id: str) -> None:
        """See `JobEngine`."""
        if (job := self._divided.get(id)) is None:
            await self._jobs.resume(id)
            return
        async with job.turn:
            job.apply(RestChanged(rests=False))
            await self._all(job.shards, self._jobs.resume)

    async def cancel_job(self, id: str) -> None:
        """See `JobEngine`."""
        if (job := self._divided.get(id)) is None:
            await self._jobs.cancel(id)
            return
        async with job.turn:
            nodes = self._nodes_of(job)
            job.apply(
                EndChanged(is_over=True)
            )  # nothing that its shards say of that has them ended otherwise
            try:
                await self._all(job.shards, self._jobs.cancel)
            except CoserveError:
                job.apply(EndChanged(is_over=False))
                raise
            self._forget(job)
            await self._undo(job, nodes)
            if job.state.end is not None:
                self._tell(job.state.end)

    # -- nodes that come and go ---------------------------------------------------------

    async def leave(self, node: ClusterNode) -> None:
        """A node drains: its jobs continue on others."""
        await asyncio.gather(*map(self._move, {self.job_of(id) for id in self._jobs.on(node)}))

    async def _move(self, id: str) -> None:
        if (job := self._divided.get(id)) is not None:
            await self._regroup(job)
        elif not await self._jobs.move(id):
            self._lost(frozenset({id}))

    def grow(self) -> None:
        """There is a node more: jobs that have fewer than they ask for begin again with it."""
        for job in list(self._divided.values()):
            if len(job.shards) < self._weights.number(
                job.state.start, job.state.asked, len(self._nodes())
            ):
                self._soon(self._regroup(job))

    def lose(self, node: ClusterNode) -> frozenset[str]:
        """A node's engine has died; jobs that no node has any more."""
        lost = {self.job_of(id) for id in self._jobs.lose(node)}
        for job in list(self._divided.values()):
            waits = any(self._jobs.node_of(shard) is None for shard in job.shards)
            if job.id in lost or (waits and len(job.shards) > len(self._nodes())):
                lost.add(job.id)
                self._leave(job)
        return frozenset(lost)

    async def checkpoint_all(self) -> None:
        """Have all rest, with checkpoints, at the end."""
        jobs = {self.job_of(id) for node in self._nodes() for id in self._jobs.on(node)}
        await asyncio.gather(*map(self.pause_job, jobs), return_exceptions=True)

    def close(self) -> None:
        """Nothing waits any more."""
        self._jobs.close()
        for task in self._tasks:
            task.cancel()

    # -- what nodes report --------------------------------------------------------------

    def take(self, report: Told) -> list[Told]:
        """What is to be told of it, as of a whole job, in this order. Of shards that are no more:
        nothing.
        """
        if report.job not in self._of:
            return [] if self._jobs.is_shard(report.job) else [report]
        job, number = self._of[report.job]
        if isinstance(report, JobEvent) and report.kind == "succeeded" and number:
            node = self._jobs.node_of(report.job)
            job.done += [] if node is None else [node]
        was_over = job.state.is_over
        told = job.apply(ShardReported(shard=number, report=report)).told
        if any(isinstance(each, JobEvent) and each.kind == "succeeded" for each in told):
            self._weights.keep(job.state.start, job.state.checkpoint)
            self._keep_from_disk(job)
            self._forget(job)
        if job.state.is_over and not was_over:
            self._leave(job)
        return list(told)

    def contributed(self, told: Contributed) -> None:
        """A node has written what the others are to have."""
        if told.job not in self._of:
            return
        job, number = self._of[told.job]
        outcome = job.apply(ShardContributed(shard=number, contributed=told))
        for other, combination in outcome.combinations.items():
            self._soon(self._combine(job, other, combination))
        if outcome.spent:
            self._soon(asyncio.to_thread(self._discard_all, outcome.spent))

    # -- shards -----------------------------------------------------------------------

    def _divide(self, job: JobStart, asked: DataParallel) -> _Divided:
        attempt, count = uuid4().hex[:8], self._weights.number(job, asked, len(self._nodes()))
        self._weights.begin(job)
        divided = _Divided(state=ShardedJob.begin(job, asked, num_shards=count, attempt=attempt))
        self._divided[job.id] = divided
        self._of.update({shard: (divided, number) for number, shard in enumerate(divided.shards)})
        return divided

    async def _start_shard(self, job: _Divided, number: int) -> None:
        """On a node of its own."""
        siblings = job.shards[:number]
        while self._divided.get(job.id) is job and any(
            self._jobs.node_of(shard) is None for shard in siblings
        ):
            await asyncio.sleep(_WAIT_S)
        if self._divided.get(job.id) is not job:
            return
        state, whole = job.state, job.state.start
        shard = Shard(
            job=job.id,
            index=number,
            count=state.num_shards,
            synchronization=state.asked.synchronization,
            every_steps=state.asked.every_steps,
            meet_every_steps=whole.checkpoint_every_steps,
            directory=str(contributions_beside(Path(whole.checkpoints)) / state.attempt),
        )
        start = replace(
            whole,
            id=job.shards[number],
            validation=whole.validation if number == 0 else None,
            shard=shard,
            paused=state.rests,
            checkpoint=state.checkpoint,
        )
        nodes = [self._jobs.node_of(each) for each in siblings]
        await self._jobs.start(
            start, excluded=frozenset(node.name for node in nodes if node is not None)
        )

    async def _start_later(self, job: _Divided, number: int) -> None:
        """What is wrong with it then is told as an event."""
        try:
            await self._start_shard(job, number)
        except EngineGoneError:  # which is told with the node's end
            return
        except CoserveError as error:
            self._fail(job, number, str(error))

    async def _combine(self, job: _Divided, number: int, combination: Combination) -> None:
        shard = job.shards[number]
        node = self._jobs.node_of(shard)
        if node is None or shard not in self._of:
            return
        try:
            await node.link.combine(shard, combination)
        except (EngineGoneError, JobOverError):
            return
        except CoserveError as error:
            self._fail(job, number, str(error))

    def _fail(self, job: _Divided, number: int, message: str) -> None:
        if self._divided.get(job.id) is job:
            self._tell(
                JobEvent(
                    job=job.shards[number],
                    kind="failed",
                    step=0,
                    now_s=time.monotonic(),
                    message=message,
                )
            )

    async def _rest(self, job: _Divided) -> None:
        """With the checkpoint of the first one, which the others come as far as before they rest,
        too. If that is of the step that all begin at, it takes the place of the one that they read
        then: so they must have read it.
        """
        if job.starts:
            await asyncio.wait(job.starts, timeout=_CATCH_UP_S)
        await self._jobs.have_begun(job.shards, _CATCH_UP_S)
        job.apply(RestChanged(rests=True))
        await self._all(job.shards[:1], self._jobs.pause)
        left_s = _CATCH_UP_S
        while job.state.is_holding and left_s > 0:
            await asyncio.sleep(_WAIT_S)
            left_s -= _WAIT_S
        await self._all(job.shards[1:], self._jobs.pause)

    async def _regroup(self, job: _Divided) -> None:
        """Have the manager start a job again, from where it is now, on the nodes that there are."""
        async with job.turn:
            with suppress(CoserveError):
                await self._rest(job)
            if self._divided.get(job.id) is not job:
                return
            await self._leave(job)
        self._lost(frozenset({job.id}))

    def _leave(self, job: _Divided) -> "asyncio.Task[None]":
        """End all shards; others of the same job wait for that."""
        self._forget(job)
        ending = self._leaving[job.id] = self._soon(self._end_shards(job, self._nodes_of(job)))
        ending.add_done_callback(
            lambda _: self._leaving.get(job.id) is ending and self._leaving.pop(job.id)
        )
        return ending

    def _forget(self, job: _Divided) -> None:
        """What its shards still say is too late."""
        if self._divided.get(job.id) is job:
            del self._divided[job.id]
        for shard in job.shards:
            self._of.pop(shard, None)

    async def _end_shards(self, job: _Divided, nodes: Collection[ClusterNode]) -> None:
        """So that their nodes can have others of the same job."""
        await asyncio.gather(
            *(self._jobs.cancel(shard, keeps=False) for shard in job.shards), return_exceptions=True
        )
        for shard in job.shards:
            self._jobs.forget(shard)
        if job.state.is_over:
            await self._undo(job, nodes)

    def _nodes_of(self, job: _Divided) -> list[ClusterNode]:
        found = map(self._jobs.node_of, job.shards)
        return [node for node in found if node is not None]

    async def _undo(self, job: _Divided, nodes: Collection[ClusterNode]) -> None:
        """It has not come to its end: where it has trained the weights that serve, engines begin
        anew with their own, since each node has others.
        """
        if job.state.start.changes_model:
            self._weights.undo(job.state.start)
            await asyncio.gather(*(node.connection.end(0.0) for node in nodes))

    def _keep_from_disk(self, job: _Divided) -> None:
        """What the job has made lies on disk: nodes may let go of it when they have no room."""
        if job.state.checkpoint is None:
            return
        adapter = AdapterRef(name=job.state.start.name, directory=job.state.checkpoint)
        self._jobs.keep(adapter)
        for node in job.done:
            self._soon(_load(node, adapter))

    async def _all(
        self, shards: Collection[str], do: Callable[[str], Coroutine[Any, Any, None]]
    ) -> None:
        """Raises what one of them raised; but that it is over, only if all are."""
        outcomes = await asyncio.gather(*map(do, shards), return_exceptions=True)
        errors = [each for each in outcomes if isinstance(each, BaseException)]
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


async def _load(node: ClusterNode, adapter: AdapterRef) -> None:
    with suppress(CoserveError):  # it is read when it is asked for
        await node.link.load_adapter(adapter)
