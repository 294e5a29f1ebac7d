"""Brings every job from what it is to what should be: see `coserve.jobs.state` for the rules.

What the store says is true. A job is `running` if the engine that lives now has taken it. When an engine is ready, and
when the server starts, every unfinished job resumes from its newest checkpoint; what its events say after that is
forgotten, since it will happen again. So every step appears once, and every example is used once per epoch.

The engine may answer late: a pause is answered when its checkpoint is on disk. Nothing here waits for that. What the
engine answers comes in as its reports do, and until then the job that it is about is left as it is; others are not.

Nothing here waits for a store that cannot be written (its disk is full, say) either. Who asks for something is told so.
What the engine has reported stays where it is, in order, and a job that could not be settled is put off alone: both are
tried again until they can be done, and so are kept, once.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any, Literal

from coserve.errors import CoserveError, EngineGoneError, JobError, StoreError
from coserve.jobs.calls import EngineCalls
from coserve.jobs.catalogue import JobAdapters
from coserve.jobs.engine_reports import EngineReports
from coserve.jobs.estimate import ProgressMeter
from coserve.jobs.inbox import Inbox, Item
from coserve.jobs.job_writer import TIMEOUT, Transitions
from coserve.jobs.machine import Asked, Gone, JobMachine
from coserve.jobs.messages import JobEngine
from coserve.jobs.models import JobModels
from coserve.jobs.records import JobRecord, JobStatus
from coserve.jobs.report_writer import JobReportWriter
from coserve.jobs.slots import Places
from coserve.jobs.state import Action, Wish, next_action, wish_of
from coserve.jobs.store_retry import StoreRetry, store_error
from coserve.jobs.validation import FileReader, Validated

_log = logging.getLogger(__name__)

# Reports that may wait for the store before the jobs that make them are held back.
_MOST_WAITING_REPORTS = 1000


class Reconciler:
    """Called from one task (`Turns`), but for `put`, `close` and the questions."""

    def __init__(
        self,
        transitions: Transitions,
        report_writer: JobReportWriter,
        adapters: JobAdapters,
        reader: FileReader,
        engine: JobEngine,
        models: JobModels,
        clock: Callable[[], float],
        wake: Callable[[], None],
        *,
        places: Places,
        timeout_s: float = inf,
    ) -> None:
        """models: jobs of others wait. wake: told that there is something to settle. timeout_s:
        that a job may run.
        """
        self._transitions, self._report_writer = transitions, report_writer
        self._adapters, self._reader = adapters, reader
        self._models, self._clock, self._wake = models, clock, wake
        self.places, self._timeout_s = places, timeout_s
        self.is_closing = False
        self._machines: defaultdict[str, JobMachine] = defaultdict(JobMachine)  # of jobs that have not ended
        self._inbox = Inbox()
        self._retry = StoreRetry(wake)
        self._put_off: set[str] = set()  # jobs that could not be settled
        self._engine_is_up = False
        self._calls = EngineCalls(engine, self.put)
        self._reports = EngineReports(
            self._machines,
            transitions,
            report_writer,
            adapters,
            self._calls,
            clock,
            settle=self._settle_jobs,
            settle_all=self.reconcile_all,
        )

    # -- questions ------------------------------------------------------------------

    def meter(self, id: str) -> ProgressMeter | None:
        """None unless it runs."""
        machine = self._machines.get(id)
        return None if machine is None else machine.meter

    def asked(self, id: str) -> "asyncio.Future[JobRecord] | None":
        """When what a client asked of a job is so; None if nothing is asked of it now."""
        machine = self._machines.get(id)
        return None if machine is None or machine.asked is None or not machine.is_asked else machine.asked.done

    @property
    def calls(self) -> Sequence["asyncio.Task[None]"]:
        """What the engine has not answered yet."""
        return self._calls.open

    # -- what the engine says -------------------------------------------------------

    def put(self, item: Item) -> None:
        """Something to settle; returns at once."""
        if item == "ready" or isinstance(item, Gone):
            self._engine_is_up = item == "ready" or (self._engine_is_up and item.jobs is not None)
        if isinstance(item, Gone):
            self._calls.lives.end(item)
        self._inbox.put(item)
        self._wake()

    async def close(self) -> None:
        """When no turn comes any more: no answer is waited for, and who asked for something gets EngineGoneError."""
        self._retry.close()
        await self._calls.close()
        for machine in self._machines.values():
            machine.refuse(EngineGoneError("the server is shutting down"))

    async def settle(self) -> None:
        """Take in all that the engine has said so far, as far as the store takes it."""
        is_early = self._retry.is_waiting and not self.is_closing
        if self._inbox.blocked is not None and is_early:
            return
        await self._inbox.take_in(self._reports.take_in)
        if self._inbox.blocked is not None:
            self._hold_back(self._inbox.blocked)
            return
        if is_early:
            return
        again, self._put_off = self._put_off, set()
        for id in again:
            await self.settle_job(id)
        if not self._put_off:
            self._retry.worked()
        while (next := self.places.next()) is not None:
            await self.settle_job(next)
            if self.places.next() == next:  # it is put off
                break

    async def settle_job(self, id: str) -> JobRecord | None:
        """Do what there is to do with a job now; the job as it is then. What the store does not take is put off, and
        whatever goes wrong is the fault of no other job: then None.
        """
        try:
            return await self.reconcile(id)
        except (StoreError, OSError) as error:
            reason = store_error(error)
            self._put_off.add(id)
            self._retry.failed(reason)
            self._machines[id].put_off(reason)
        except Exception as error:
            _log.exception("job %s could not be settled: %s", id, error)
            self._machines[id].refuse(JobError(f"Job {id} could not be changed; the server's log says why"))
        return None

    def _hold_back(self, error: CoserveError) -> None:
        """The store does not take what comes first. Who waits is told; jobs that report too much rest meanwhile: when
        that has been taken in, they are resumed as any job is that should run and does not.
        """
        self._retry.failed(error)
        for id, machine in self._machines.items():
            machine.put_off(error)
            if len(self._inbox) > _MOST_WAITING_REPORTS and machine.holding == "running" and machine.told is None:
                self._tell("tell_pause", id)

    # -- the loop -------------------------------------------------------------------

    async def reconcile_all(self) -> None:
        """Every job that has not ended."""
        jobs = await asyncio.to_thread(self._transitions.unfinished)
        await self._settle_jobs([job.id for job in jobs])

    async def _settle_jobs(self, ids: Collection[str]) -> None:
        for id in ids:
            await self.settle_job(id)

    async def ask(self, id: str, wish: Wish) -> "asyncio.Future[JobRecord]":
        """A client wants something of a job, of which nothing else is asked now.

        StoreError or OSError: it cannot be kept now, and nothing has been done. JobError: an end that was asked for
        before stands.
        """
        machine = self._machines[id]
        assert not machine.is_asked, "one wish at a time"
        if self._inbox.blocked is not None:
            raise self._inbox.blocked
        before = machine.asked
        if before is not None and wish != before.wish:
            raise JobError(f"Job {id} is being cancelled")
        done: asyncio.Future[JobRecord] = asyncio.get_running_loop().create_future()
        machine.asked = Asked(wish=wish, done=done)
        try:
            await self.reconcile(id)
        except BaseException:
            machine.asked = before
            raise
        return done

    async def reconcile(self, id: str) -> JobRecord:
        """Do what there is to do with a job now, one step after the other; the job as it is then.

        What should be is what a client has asked for, or what follows from the job's status.
        """
        while True:
            job = await asyncio.to_thread(self._transitions.job, id)
            if job.is_terminal:
                return job
            machine = self._machines[id]
            if machine.failure is not None and machine.holding in ("nothing", "ended"):
                return await self.end(id, "failed", machine.failure)
            if machine.has_succeeded and await asyncio.to_thread(self._transitions.has_last_checkpoint, id):
                return await self.end(id, "succeeded")
            if machine.told is not None:
                return job
            action = next_action(
                job.status,
                wish=machine.wish or wish_of(job.status),
                holding=machine.holding,
                is_validated=job.validated,
            )
            if action is None or not await self._do(action, job):
                break
        job = await asyncio.to_thread(self._transitions.job, id)
        machine.grant(job)
        return job

    async def _do(self, action: Action, job: JobRecord) -> bool:
        """Whether it could be done; False: there is nothing to do now but wait."""
        if action == "read_files":
            self._read(job)
            return False
        if action in ("start", "tell_resume") and not self._has_place(job):
            if job.status == "paused":
                await self._write("write_queued", job)
            return False
        if action == "start":
            return await self._start(job)
        if action == "tell_cancel":  # which cannot be taken back
            await asyncio.to_thread(self._transitions.require_room, job.id)
        if action.startswith("tell_"):
            self._tell(action, job.id)
        elif action == "write_cancelled":
            await self.end(job.id, "cancelled")
            self._reader.stop(job.id)
        else:
            await self._write(action, job)
        return True

    def _read(self, job: JobRecord) -> None:
        if job.base in self._models:
            self._reader.begin(job)

    def _has_place(self, job: JobRecord) -> bool:
        return job.base in self._models and self.places.ask(job.id, job.tenant)

    def _may_start(self, id: str) -> bool:
        """Whether there is an engine, and all that engines have done to a job so far has been taken in."""
        is_settled = self._calls.lives.of(id) == self._reports.lives.of(id)
        return self._engine_is_up and is_settled and "ready" not in self._inbox

    async def _start(self, job: JobRecord) -> bool:
        """Have the engine run a queued job from its newest checkpoint."""
        if not self._may_start(job.id):
            return False
        deaths = await asyncio.to_thread(self._transitions.deaths, job.id)
        if deaths is not None and deaths.are_too_many:  # the server ended before it could write that down
            self._machines[job.id].set_aside()
            return True
        checkpoint, is_done = await asyncio.to_thread(self._transitions.roll_back, job)
        self._adapters.changed()
        if is_done:
            await self.end(job.id, "succeeded")
            return True
        if not self._may_start(job.id):
            return False
        machine = self._machines[job.id]
        directory = None if checkpoint is None else checkpoint.directory
        alone = 0 if deaths is None else deaths.alone_until_step
        start = self._transitions.start_of(
            job, directory, alone_until_step=alone, model=self._models.engine_name(job.base)
        )
        machine.holding = "running"
        machine.resumed_step, machine.was_resumed = 0 if checkpoint is None else checkpoint.step, False
        self._measure_anew(job.id)
        self._watch_time(job.id)
        self._calls.start(machine, start, life=self._reports.lives.of(job.id))
        return True

    def _tell(self, action: Action, id: str) -> None:
        if action == "tell_resume":
            self._measure_anew(id)
            self._watch_time(id)
        elif action in ("tell_pause", "tell_cancel"):
            self._machines[id].rest(self._clock())
        self._calls.tell(self._machines[id], action, id, life=self._reports.lives.of(id))

    def _watch_time(self, id: str) -> None:
        """It runs from now on, and may do so for what is left of its time."""
        machine, now_s = self._machines[id], self._clock()
        machine.run(now_s)
        if self._timeout_s < inf:
            left_s = max(0.0, self._timeout_s - machine.ran_s(now_s))
            asyncio.get_running_loop().call_later(left_s, self._check_time, id)

    def _check_time(self, id: str) -> None:
        machine = self._machines.get(id)
        if machine is None or machine.failure is not None or machine.ran_s(self._clock()) < self._timeout_s:
            return
        message = f"the job has run for the {self._timeout_s:g} s that a job may (--job-timeout)"
        machine.failure = {"code": TIMEOUT, "message": message, "param": None}
        self._put_off.add(id)
        self._wake()

    def _measure_anew(self, id: str) -> None:
        self._machines[id].meter = ProgressMeter(self._clock())
        self._report_writer.begin(id)

    async def _write(self, action: Action, job: JobRecord) -> None:
        """A state of a job that has not ended, with the event that tells it."""
        machine = self._machines[job.id]
        status: JobStatus
        message: str | None = None
        if action == "write_paused":
            status, message, machine.meter = "paused", "Fine-tuning job paused", None
            self.places.leave(job.id)
        elif action == "write_running":
            status, message = "running", _beginning(job, machine)
        else:
            status = "validating_files" if action == "write_validating" else "queued"
            message = "Fine-tuning job resumed" if job.status == "paused" else None
        await asyncio.to_thread(self._transitions.change, job.id, status, message)

    # -- other changes --------------------------------------------------------------

    async def files_read(self, id: str, found: Validated | JobError) -> None:
        """What is in a job's files is known. StoreError or OSError: that is to be told again."""
        job = await asyncio.to_thread(self._transitions.job, id)
        if job.is_terminal:
            await asyncio.to_thread(self._transitions.sweep, id)
        elif isinstance(found, JobError):
            error = {"code": f"invalid_{found.param}", "message": str(found), "param": found.param}
            await self.end(id, "failed", error)
        elif not job.validated:
            await asyncio.to_thread(self._transitions.validated, job, found)
            await self.settle_job(id)

    async def end(
        self, id: str, status: Literal["succeeded", "failed", "cancelled"], error: dict[str, Any] | None = None
    ) -> JobRecord:
        """A job ends: what an engine may still say of it is too late."""
        job = await asyncio.to_thread(self._transitions.end, id, status, error)
        machine = self._machines.pop(id, None)
        self.places.leave(id)
        self._adapters.remove_live(job)
        self._adapters.changed()
        if machine is not None:
            machine.grant(job)
        return job


def _beginning(job: JobRecord, machine: JobMachine) -> str:
    """What is told of a job that runs from now on. One that was resumed and waited for a place has been told so."""
    if machine.was_resumed:
        return "Fine-tuning job resumed" if job.status == "paused" else _resuming(job.num_steps_done)
    return _resuming(machine.resumed_step) if machine.resumed_step else "Fine-tuning job started"


def _resuming(step: int) -> str:
    return f"Fine-tuning resumes from step {step}"
