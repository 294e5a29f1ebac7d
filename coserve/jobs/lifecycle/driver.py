"""Driver of jobs: brings each job from its actual to its desired state by `apply` and `plan`.

The store is the source of truth: what an event brings is written there first, whole or not at all,
and only then applied to the `JobState`. A job is `running` if the engine that lives now has
accepted it. When an engine becomes ready, and when the server starts, every unfinished job resumes
from its newest checkpoint; its later events are deleted, since those steps run again. So every step
appears once, and every example is used once per epoch.

The engine may answer late: a pause is answered when its checkpoint is on disk. The driver does not
wait for that. An answer is an event, and until it arrives its job is left as it is; other jobs are
not.

The driver does not wait for a store that cannot be written either (its disk is full, say). A
client's request fails with an error. Reports of the engine stay queued in order, and a job that
could not be settled is put off alone: both are retried until they succeed, so that each is recorded
exactly once.
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

# Number of queued events beyond which running jobs are paused.
_MAX_WAITING_EVENTS = 1000


class JobDriver:
    """The driver of all jobs, for use in the mailbox's task; `put`, `close` and the lookups may be
    called from outside it.
    """

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
        """Connect jobs with the store, the engine and the mailbox.

        Args:
            timeout_s: Longest time that a job may run.
        """
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
        """Start with the jobs that have not ended, none of which an engine has."""
        for job in jobs:
            self.add(job)
        self.mailbox.start()
        await self.mailbox.call(self._settle_all)

    def add(self, job: JobRecord) -> None:
        """Add a job from the store."""
        self.jobs.add(JobState(job=job, has_model=job.base in self._models))

    async def close(self) -> None:
        """Handle all pending reports and stop; open answers are not awaited, and waiting clients
        get EngineGoneError.
        """
        await self.mailbox.close()
        self._retry.close()
        await self.actions.close()
        self.jobs.refuse_all(EngineGoneError("the server is shutting down"))

    # -- events ---------------------------------------------------------------------

    def put(self, event: EngineEvent) -> None:
        """Queue an event and return at once; after a loss, commands that were planned for the dead
        engine are not sent.
        """
        if isinstance(event, EngineLost | EngineReady):
            self.jobs.announce(event)
        self.mailbox.put(event)

    async def settle(self) -> None:
        """Handle all queued events, as far as the store accepts them, and retry postponed jobs."""
        # After a refusal of the store, everything waits for the timer; at the end of the server
        # there is one last attempt.
        is_early = self._retry.is_waiting and not self.mailbox.is_closing
        if self.mailbox.blocked is not None and is_early:
            return
        await self.mailbox.take_events(self._take)
        if self.mailbox.blocked is not None:
            self._hold_back(self.mailbox.blocked)
            return
        # Postponed jobs wait for the timer; the events of other jobs were taken above.
        if is_early:
            return
        # Jobs that fail again add themselves to the new set.
        again, self._put_off = self._put_off, set()
        await self._settle_jobs(again)
        if not self._put_off:
            self._retry.worked()
        # Jobs that have ended or were paused may have freed slots.
        while (next := self.jobs.grant_next_slot()) is not None:
            await self.settle_job(next)

    async def _take(self, events: Sequence[EngineEvent]) -> None:
        """Handle events.

        Args:
            events: Reports, or one event of another kind.

        Raises:
            StoreError, OSError: Nothing was done, and the call can be repeated.
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
            # A report proves that the engine has accepted the job: the answer to the start is only
            # late.
            if pending is not None and pending.command == "start":
                await self._take_answer(EngineAnswered(job=id, command=pending))
        # Reports on jobs that the living engine does not have are dropped by the writer.
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
        # A job succeeds once its last checkpoint is on record, which may follow later.
        await self._settle_jobs([state.id for state in self.jobs if state.has_ended])

    async def _take_answer(self, answer: EngineAnswered) -> None:
        id, command, error = answer.job, answer.command, answer.error
        state = self.jobs.get(id)
        # The job may have ended meanwhile, or a report may have proved that it runs.
        if state is None or state.pending != command:
            return
        # Judged by the state before the answer, which clears the pending command.
        refused = refusal(state, answer, is_current=self.jobs.is_current(id, command))
        self.jobs.apply(id, answer)
        if refused is not None:
            if not isinstance(error, EngineGoneError):
                _log.error("job %s: the engine did not do %r: %s", id, command.command, error)
            self.jobs.refuse(id, refused)
            return
        # Any other error is a bug, which fails this job alone.
        if error is not None and not isinstance(error, CoserveError):
            _log.error("job %s could not be started", id, exc_info=error)
        await self.settle_job(id)

    async def _take_loss(self, loss: EngineLost) -> None:
        """Have the jobs of an engine that has died wait for the next one."""
        # First of all: a client that sees in the store that a job waits must not find its adapter
        # served.
        self._adapters.lose_live(loss.had)
        lost = [state.id for state in self.jobs if loss.had(state.id) and state.engine != "absent"]
        queued, fatal = await asyncio.to_thread(self._writer.lose_engine, lost, loss.under_way)
        # After the store: if it refuses, the event stays queued and is taken again as a whole.
        self.jobs.apply_loss(loss)
        for job in queued:
            self.jobs.apply(job.id, RecordWritten(job=job))
        for id in fatal:
            self.jobs.apply(id, TOO_MANY_DEATHS)
        await self._settle_jobs(fatal)

    async def _take_time(self, id: str) -> None:
        state = self.jobs.get(id)
        # Timers are not cancelled: this one may belong to a run that a pause has interrupted.
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
        """Keep events for later because the store does not accept the first one.

        Clients that wait get an error. Running jobs are paused when too many events are queued;
        afterwards the plan resumes them, as any job that should run and does not.
        """
        self._retry.failed(error)
        for state in self.jobs:
            self.jobs.put_off(state.id, error)
            if (
                self.mailbox.num_events > _MAX_WAITING_EVENTS
                and state.engine == "running"
                and state.pending is None
            ):
                self.actions.send(state.id, "pause")

    # -- requests of clients --------------------------------------------------------

    async def ask(self, id: str, desired: DesiredState) -> Waiter:
        """Start to bring a job to the state that a client desires; no other request is open for it.

        Raises:
            StoreError, OSError: The store cannot be written now, and nothing was done.
            JobError: The job has ended, or is already being cancelled.
        """
        if self.mailbox.blocked is not None:
            # Earlier events are not on record yet, and a write now would overtake them.
            raise self.mailbox.blocked
        if (record := await self._read_record(id)) is None or record.is_terminal:
            raise JobError(f"Job {id} has already completed")
        before = self.jobs[id].asked
        # A certain end stays requested after its client got an error; only it may be repeated.
        if before not in (None, desired):
            raise JobError(f"Job {id} is being cancelled")
        waiter = self.jobs.ask(id, desired)
        try:
            await self._advance(id)
        # The client gets this error, so nothing may carry out its request later.
        except BaseException as error:
            self.jobs.take_back(id, before)
            if isinstance(error, StoreError | OSError):
                self.check_later(id, error)
            raise
        return waiter

    def check_later(self, id: str, error: StoreError | OSError) -> None:
        """Settle a job again once the store works: a write that the store refused may have taken
        effect all the same.
        """
        self._put_off.add(id)
        self._retry.failed(store_error(error))

    async def read(self, id: str, result: Validated | JobError) -> None:
        """Record what was found in a job's files.

        Raises:
            StoreError, OSError: The store cannot be written now; the call is to be repeated.
        """
        if (record := await self._read_record(id)) is None or record.is_terminal:
            # The job ended while its files were read: the examples written meanwhile are removed.
            await asyncio.to_thread(self._writer.sweep, id)
            return
        if isinstance(result, JobError):
            self.jobs.apply(
                id,
                JobFailed(code=f"invalid_{result.param}", message=str(result), param=result.param),
            )
        # False in a repeated call whose first attempt took effect in the store after all.
        elif not self.jobs[id].job.validated:
            job = await asyncio.to_thread(self._writer.validated, self.jobs[id].job, result)
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
        """Do all that can be done with a job now, and return its record.

        Failures stay with this job: what the store refuses is put off, and any other error is
        logged. Both return None.
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
        """Carry out planned actions until none is left, and return the job's record; None if there
        is no such job.
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
        """Return a job's record from the store and update its state from it; None if there is none.

        A write that the store reported as failed may have taken effect: a connection to PostgreSQL
        can break during a commit. So the record in memory is never assumed to be the one in the
        store.
        """
        job = await asyncio.to_thread(self._writer.any_job, id)
        if job is None or (job.is_terminal and id not in self.jobs):
            return job
        if job.is_terminal:
            # A write that was reported as failed has ended the job.
            self.actions.let_go(job)
        elif id not in self.jobs:
            self.add(job)
        elif job != self.jobs[id].job:
            self.jobs.apply(id, RecordWritten(job=job))
        return job
