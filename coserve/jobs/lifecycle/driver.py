"""Drives each job from its actual to its desired state: events in, `apply`, `plan`, and what the
plan says.

The store is true: what an event brings is written there first, whole or not at all, and applied to
the `JobState` after that. A job is `running` if the engine that lives now has taken it. When an
engine is ready, and when the server starts, every unfinished job resumes from its newest
checkpoint; what its events say after that is forgotten, since it will happen again. So every step
appears once, and every example is used once per epoch.

The engine may answer late: a pause is answered when its checkpoint is on disk. Nothing here waits
for that. An answer is an event, and until it comes the job that it is about is left as it is;
others are not.

Nothing here waits for a store that cannot be written (its disk is full, say) either. A client that
asks for something gets an error. What the engine has reported stays where it is, in order, and a
job that could not be settled is put off alone: both are tried again until they can be done, and so
are kept, once.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from math import inf

from coserve.errors import CoserveError, EngineGoneError, JobError, StoreError
from coserve.jobs.datasets.validation import FileReader, Validated
from coserve.jobs.lifecycle.actions import TOO_MANY_DEATHS, JobActions
from coserve.jobs.lifecycle.catalogue import JobAdapters
from coserve.jobs.lifecycle.events import (
    DesiredState,
    EngineAnswered,
    EngineEvent,
    EngineLost,
    EngineReady,
    EngineReported,
    JobFailed,
    ReadingEnded,
    RecordWritten,
    TimeUp,
)
from coserve.jobs.lifecycle.job_writer import TIMEOUT, JobWriter
from coserve.jobs.lifecycle.live_jobs import LiveJobs, Waiter
from coserve.jobs.lifecycle.mailbox import JobMailbox
from coserve.jobs.lifecycle.plan import plan, refusal
from coserve.jobs.lifecycle.report_writer import JobReportWriter
from coserve.jobs.lifecycle.slots import TrainingSlots
from coserve.jobs.lifecycle.state import JobState
from coserve.jobs.lifecycle.store_retry import StoreRetry, store_error
from coserve.jobs.messages import JobEngine
from coserve.jobs.models import JobModels
from coserve.jobs.records import JobRecord

_log = logging.getLogger(__name__)

# Events that may wait for the store before the jobs that report are paused.
_MAX_WAITING_EVENTS = 1000


class JobDriver:
    """Called from the mailbox's task, but for `put`, `close` and the questions."""

    def __init__(
        self,
        *,
        writer: JobWriter,
        report_writer: JobReportWriter,
        adapters: JobAdapters,
        reader: FileReader,
        engine: JobEngine,
        models: JobModels,
        clock: Callable[[], float],
        slots: TrainingSlots,
        timeout_s: float = inf,
    ) -> None:
        """timeout_s: how long a job may run."""
        self._writer, self._report_writer, self._adapters = writer, report_writer, adapters
        self._models, self._clock, self._timeout_s = models, clock, timeout_s
        self.jobs = LiveJobs(slots)
        self._put_off: set[str] = set()  # jobs that could not be settled
        self.mailbox = JobMailbox(self.settle)
        self._retry = StoreRetry(self.mailbox.wake)
        self.actions = JobActions(
            self.jobs,
            writer=writer,
            adapters=adapters,
            reader=reader,
            engine=engine,
            models=models,
            clock=clock,
            timeout_s=timeout_s,
            put=self.put,
        )

    # -- life -----------------------------------------------------------------------

    async def start(self, jobs: Collection[JobRecord]) -> None:
        """Begin with the jobs that have not ended, which no engine has."""
        for job in jobs:
            self.add(job)
        self.mailbox.start()
        await self.mailbox.call(self._settle_all)

    def add(self, job: JobRecord) -> None:
        """Take over a job from the store."""
        self.jobs.add(JobState(job=job, has_model=job.base in self._models))

    async def close(self) -> None:
        """Take what has been reported, and end: no answer is waited for, and clients that wait get
        EngineGoneError.
        """
        await self.mailbox.close()
        self._retry.close()
        await self.actions.close()
        self.jobs.refuse_all(EngineGoneError("the server is shutting down"))

    # -- events ---------------------------------------------------------------------

    def put(self, event: EngineEvent) -> None:
        """Have an event handled; returns at once. No engine that has died is told anything from now
        on.
        """
        if isinstance(event, EngineLost | EngineReady):
            self.jobs.announce(event)
        self.mailbox.put(event)

    async def settle(self) -> None:
        """Handle all events so far, as far as the store takes them, and what was put off."""
        is_early = self._retry.is_waiting and not self.mailbox.is_closing
        if self.mailbox.blocked is not None and is_early:
            return
        await self.mailbox.take_events(self._take)
        if self.mailbox.blocked is not None:
            self._hold_back(self.mailbox.blocked)
            return
        if is_early:
            return
        again, self._put_off = self._put_off, set()
        await self._settle_jobs(again)
        if not self._put_off:
            self._retry.worked()
        while (next := self.jobs.grant_next_slot()) is not None:
            await self.settle_job(next)

    async def _take(self, events: Sequence[EngineEvent]) -> None:
        """Handle events. StoreError or OSError: nothing of it was done, and it can be tried again.

        Args:
            events: Reports, or one event of another kind.
        """
        first = events[0]
        match first:
            case EngineReported():
                await self._take_reports(
                    [each for each in events if isinstance(each, EngineReported)]
                )
            case EngineAnswered():
                await self._take_answer(first)
            case EngineLost():
                await self._take_loss(first)
            case EngineReady():
                self.jobs.apply_ready(first)
                await self._settle_all()
            case TimeUp():
                await self._take_time(first.job)

    async def _take_reports(self, reports: Sequence[EngineReported]) -> None:
        for id in {id for report in reports for id in report.jobs}:
            pending = self.jobs[id].pending if id in self.jobs else None
            if (
                pending is not None and pending.command == "start"
            ):  # the job has been taken: its answer is on the way
                await self._take_answer(EngineAnswered(job=id, command=pending))
        last_step_s = {
            state.id: state.last_step_s for state in self.jobs if state.engine != "absent"
        }
        recorded = await asyncio.to_thread(
            self._report_writer.write, reports, last_step_s, self._clock()
        )
        for id, events in recorded.events.items():
            for event in events:
                self.jobs.apply(id, event)
        for job in recorded.published.values():
            if job.settings["live"] and not job.is_terminal:
                self._adapters.add_live(job)
        if recorded.num_checkpoints:
            self._adapters.changed()
        # A job has succeeded when its last checkpoint is there, which may come later.
        await self._settle_jobs([state.id for state in self.jobs if state.has_ended])

    async def _take_answer(self, answer: EngineAnswered) -> None:
        id, command, error = answer.job, answer.command, answer.error
        state = self.jobs.get(id)
        if (
            state is None or state.pending != command
        ):  # the job has ended meanwhile, or has been seen to run
            return
        refused = refusal(state, answer, is_current=self.jobs.is_current(id, command))
        self.jobs.apply(id, answer)
        if refused is not None:
            if not isinstance(error, EngineGoneError):
                _log.error("job %s: the engine did not do %r: %s", id, command.command, error)
            self.jobs.refuse(id, refused)
            return
        if error is not None and not isinstance(error, CoserveError):  # a bug; of this job alone
            _log.error("job %s could not be started", id, exc_info=error)
        await self.settle_job(id)

    async def _take_loss(self, loss: EngineLost) -> None:
        """Have the jobs of an engine that has died wait for the next one."""
        self._adapters.lose_live(
            loss.had
        )  # first: who reads in the store that they wait must not find them served
        lost = [state.id for state in self.jobs if loss.had(state.id) and state.engine != "absent"]
        queued, fatal = await asyncio.to_thread(self._writer.lose_engine, lost, loss.under_way)
        self.jobs.apply_loss(loss)
        for job in queued:
            self.jobs.apply(job.id, RecordWritten(job=job))
        for id in fatal:
            self.jobs.apply(id, TOO_MANY_DEATHS)
        await self._settle_jobs(fatal)

    async def _take_time(self, id: str) -> None:
        state = self.jobs.get(id)
        if (
            state is None
            or state.failure is not None
            or state.ran_s(self._clock()) < self._timeout_s
        ):
            return
        message = f"the job has run for the {self._timeout_s:g} s that a job may (--job-timeout)"
        self.jobs.apply(id, JobFailed(code=TIMEOUT, message=message))
        await self.settle_job(id)

    def _hold_back(self, error: CoserveError) -> None:
        """The store does not take the first event. Clients that wait get an error; jobs are paused
        if they report too much meanwhile: when that has been taken, they are resumed as any job is
        that should run and does not.
        """
        self._retry.failed(error)
        for state in self.jobs:
            self.jobs.put_off(state.id, error)
            if (
                self.mailbox.num_events > _MAX_WAITING_EVENTS
                and state.engine == "running"
                and state.pending is None
            ):
                self.actions.tell(state.id, "pause")

    # -- what clients ask -----------------------------------------------------------

    async def ask(self, id: str, desired: DesiredState) -> Waiter:
        """Have a job, of which nothing else is asked now, brought to what a client wants.

        Raises:
            StoreError, OSError: It cannot be kept now, and nothing has been done.
            JobError: An end that was asked for before stands.
        """
        if self.mailbox.blocked is not None:
            raise self.mailbox.blocked
        if (record := await self._read_record(id)) is None or record.is_terminal:
            raise JobError(f"Job {id} has already completed")
        before = self.jobs[id].asked
        if before not in (None, desired):
            raise JobError(f"Job {id} is being cancelled")
        waiter = self.jobs.ask(id, desired)
        try:
            await self._advance(id)
        except BaseException as error:
            self.jobs.take_back(id, before)
            if isinstance(error, StoreError | OSError):
                self.check_later(id, error)
            raise
        return waiter

    def check_later(self, id: str, error: StoreError | OSError) -> None:
        """Have a job looked at again when the store works: a write that it refused may be in it all
        the same.
        """
        self._put_off.add(id)
        self._retry.failed(store_error(error))

    async def read(self, id: str, found: Validated | JobError) -> None:
        """Take what is in a job's files. StoreError or OSError: this is to be called again."""
        if (record := await self._read_record(id)) is None or record.is_terminal:
            await asyncio.to_thread(self._writer.sweep, id)
            return
        if isinstance(found, JobError):
            self.jobs.apply(
                id, JobFailed(code=f"invalid_{found.param}", message=str(found), param=found.param)
            )
        elif not self.jobs[id].job.validated:
            job = await asyncio.to_thread(self._writer.validated, self.jobs[id].job, found)
            self.jobs.apply(id, RecordWritten(job=job))
        self.jobs.apply(id, ReadingEnded())
        await self.settle_job(id)

    # -- the loop -------------------------------------------------------------------

    async def _settle_all(self) -> None:
        await self._settle_jobs([state.id for state in self.jobs])

    async def _settle_jobs(self, ids: Collection[str]) -> None:
        for id in ids:
            await self.settle_job(id)

    async def settle_job(self, id: str) -> JobRecord | None:
        """Do what there is to do with a job now; returns it as it is then. What the store does not
        take is put off, and no other job suffers from what goes wrong with this one: then None.
        """
        try:
            return await self._advance(id)
        except (StoreError, OSError) as error:
            self.check_later(id, error)
            self.jobs.put_off(id, store_error(error))
        except Exception as error:
            _log.exception("job %s could not be settled: %s", id, error)
            self.jobs.refuse(
                id, JobError(f"Job {id} could not be changed; the server's log says why")
            )
        return None

    async def _advance(self, id: str) -> JobRecord | None:
        """Do what the plan says, one action after the other, until there is nothing left to do;
        returns the job as it is then, None if there is none.
        """
        while (job := await self._read_record(id)) is not None and not job.is_terminal:
            state = self.jobs[id]
            action = plan(state, can_start=self.jobs.can_start(id))
            if action is None:
                if state.pending is None:
                    self.jobs.grant(id)
                return job
            await self.actions.do(action, state)
        return job

    async def _read_record(self, id: str) -> JobRecord | None:
        """Return a job as the store has it, and take that over; None if there is none.

        A write of which the store said that it failed may have been done: a connection to
        PostgreSQL can break while it commits. So what is in memory is never taken for what the
        store has.
        """
        job = await asyncio.to_thread(self._writer.any_job, id)
        if job is None or (job.is_terminal and id not in self.jobs):
            return job
        if job.is_terminal:
            self.actions.let_go(job)
        elif id not in self.jobs:
            self.add(job)
        elif job != self.jobs[id].job:
            self.jobs.apply(id, RecordWritten(job=job))
        return job
