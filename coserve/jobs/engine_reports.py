"""What engines say of jobs, taken in: reports, answers to commands, that one is ready, that one has died."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence

from coserve.errors import CoserveError, EngineGoneError, JobError, JobOverError
from coserve.jobs.calls import EngineCalls
from coserve.jobs.catalogue import JobAdapters
from coserve.jobs.inbox import Item
from coserve.jobs.job_writer import Transitions
from coserve.jobs.machine import Answer, Gone, JobMachine, Lives, Told
from coserve.jobs.report_writer import JobReportWriter, Report

_log = logging.getLogger(__name__)


class EngineReports:
    """Called from the reconciler's task alone. lives: of engines, as far as their deaths have been taken in."""

    def __init__(
        self,
        machines: defaultdict[str, JobMachine],
        transitions: Transitions,
        report_writer: JobReportWriter,
        adapters: JobAdapters,
        calls: EngineCalls,
        clock: Callable[[], float],
        *,
        settle: Callable[[Collection[str]], Awaitable[None]],
        settle_all: Callable[[], Awaitable[None]],
    ) -> None:
        """machines: of all jobs, shared with the reconciler. settle: does what there is to do with some jobs now;
        settle_all: with all that have not ended.
        """
        self._machines, self._transitions, self._report_writer = machines, transitions, report_writer
        self._adapters, self._calls, self._clock = adapters, calls, clock
        self._settle, self._settle_all = settle, settle_all
        self.lives = Lives()

    async def take_in(self, items: Sequence[Item]) -> None:
        """StoreError or OSError: nothing of it has been, and it can be tried again. items: neighbours of one kind."""
        first = items[0]
        if isinstance(first, Report):
            await self._record([item for item in items if isinstance(item, Report)])
        elif isinstance(first, Answer):
            await self._answered(first.told, first.error)
        elif isinstance(first, Gone):
            await self._lose(first)
        else:
            await self._settle_all()

    async def _record(self, reports: list[Report]) -> None:
        for id in {id for report in reports for id in report.jobs if id in self._machines}:
            told = self._machines[id].told
            if told is not None and told.action == "start":  # so it has been taken, and its answer is on the way
                await self._answered(told, None)
        recorded = await asyncio.to_thread(self._report_writer.record, reports, self._is_here)
        for id, num_steps in recorded.num_steps.items():
            machine = self._machines[id]
            if machine.meter is not None:
                machine.meter.steps_done(num_steps, self._clock())
        for job in recorded.published.values():
            if job.settings["live"] and not job.is_terminal:
                self._adapters.add_live(job)
        if recorded.num_checkpoints:
            self._adapters.changed()
        for id in recorded.left & self._machines.keys():
            self._machines[id].left(recorded.ended.get(id), is_terminal=id in recorded.ended)
        # A job has succeeded when its last checkpoint is there, which may come later.
        await self._settle([id for id, machine in self._machines.items() if machine.has_ended])

    def _is_here(self, id: str) -> bool:
        """Whether a job is the living engine's to report on."""
        return id in self._machines and self._machines[id].holding != "nothing"

    async def _lose(self, gone: Gone) -> None:
        """An engine has died, and every job that it had with it."""
        self._adapters.lose_live(gone.had)  # first: who reads in the store that they wait must not find them served
        lost = [id for id in self._machines if gone.had(id) and self._is_here(id)]
        fatal = await asyncio.to_thread(self._transitions.engine_died, lost, gone.under_way)
        self.lives.end(gone)
        for id, machine in self._machines.items():
            if gone.had(id):
                machine.holding, machine.has_succeeded, machine.meter = "nothing", False, None
                machine.rest(self._clock())
        for id in fatal:
            self._machines[id].set_aside()
        await self._settle(fatal)

    async def _answered(self, told: Told, error: Exception | None) -> None:
        machine = self._machines.get(told.job)
        if machine is None or machine.told is not told:  # it has ended meanwhile, or has been seen to run
            return
        machine.told = None
        if told.life != self.lives.of(told.job) or isinstance(error, EngineGoneError):
            machine.holding = "nothing"
            is_last = told.life == self._calls.lives.of(told.job)  # of no death known here
            if isinstance(error, EngineGoneError) and is_last:
                machine.refuse(error)
                return
        elif told.action == "start":
            if error is not None:
                self._refused(told.job, error)
        elif isinstance(error, JobOverError):
            machine.holding = "ended"
        elif error is not None:
            _log.error("job %s: the engine did not do %r: %s", told.job, told.action, error)
            machine.refuse(JobError(f"The engine could not do this with job {told.job}: {error}"))
            return  # or it would be told the same for ever
        else:
            machine.done(told.action)
        await self._settle([told.job])

    def _refused(self, id: str, error: Exception) -> None:
        message = str(error)
        if not isinstance(error, CoserveError):  # a bug; of this job, and the others must not wait for it
            _log.error("job %s could not be started", id, exc_info=error)
            message = f"the job could not be started: {error!r}"
        self._machines[id].holding = "nothing"
        self._machines[id].failure = {"code": "job_refused", "message": message, "param": None}
