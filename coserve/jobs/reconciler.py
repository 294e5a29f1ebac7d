"""Brings every job from what it is to what should be: see `coserve.jobs.states` for the rules.

What the store says is true. A job is `running` if the engine that lives now has taken it. When an engine is ready, and
when the server starts, every unfinished job resumes from its newest checkpoint; what its events say after that is
forgotten, since it will happen again. So every step appears once, and every example is used once per epoch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from coserve.errors import CoserveError, EngineGoneError, JobError, StoreError
from coserve.jobs.catalogue import JobAdapters
from coserve.jobs.estimate import ProgressMeter
from coserve.jobs.messages import JobEngine
from coserve.jobs.recording import Recorder, Report
from coserve.jobs.records import JobRecord, JobStatus
from coserve.jobs.states import Action, Holding, Wish, next_action, wish_of
from coserve.jobs.transitions import Transitions
from coserve.jobs.validation import FileReader, Validated

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_STORE_WAIT_S = 1.0
# Engines that died in a row without a step of a job that they had: then it is what kills them, as far as one can know.
_MOST_DEATHS = 10


@dataclass
class JobMachine:
    """What this process alone knows of a job that has not ended."""

    holding: Holding = "nothing"
    has_succeeded: bool = False  # in the engine
    num_deaths: int = 0  # of engines that had it, in a row
    meter: ProgressMeter | None = None  # while it runs
    resumed_step: int = 0  # where the engine began
    was_resumed: bool = False  # by a client, since it was last written down


class Reconciler:
    """Called from one task (`Turns`), but for `put` and the questions."""

    def __init__(
        self,
        transitions: Transitions,
        recorder: Recorder,
        adapters: JobAdapters,
        reader: FileReader,
        engine: JobEngine,
        base: str,
        clock: Callable[[], float],
    ) -> None:
        """base: the model that is served; jobs of others wait."""
        self._transitions, self._recorder, self._adapters, self._reader = transitions, recorder, adapters, reader
        self._engine, self._base, self._clock = engine, base, clock
        self.is_closing = False
        self._machines: dict[str, JobMachine] = {}
        self._inbox: deque[Report | Literal["ready", "gone"]] = deque()
        self._engine_is_up = False

    # -- questions ------------------------------------------------------------------

    def machine(self, id: str) -> JobMachine:
        """Of a job that has not ended."""
        return self._machines.setdefault(id, JobMachine())

    def meter(self, id: str) -> ProgressMeter | None:
        """None unless it runs."""
        machine = self._machines.get(id)
        return None if machine is None else machine.meter

    # -- what the engine says -------------------------------------------------------

    def put(self, item: Report | Literal["ready", "gone"]) -> None:
        """Something to settle; returns at once."""
        if not isinstance(item, Report):
            self._engine_is_up = item == "ready"
        self._inbox.append(item)

    async def settle(self) -> None:
        """Take in all that the engine has said so far."""
        while self._inbox:
            batch: list[Report] = []
            item = self._inbox[0]
            while self._inbox and isinstance(self._inbox[0], Report):
                batch.append(self._inbox[0])
                self._inbox.popleft()
            try:
                if batch:
                    await self._record(batch)
                else:
                    self._inbox.popleft()
                    await (self.reconcile_all() if item == "ready" else self._lose_all())
            except Exception as error:  # the next job's fate must not hang on this one's
                _log.exception("a job's report could not be taken in: %s", error)

    async def _record(self, reports: list[Report]) -> None:
        recorded = await self._in_store(self._recorder.record, reports, self._is_here)
        for id, num_steps in recorded.num_steps.items():
            machine = self.machine(id)
            machine.num_deaths = 0
            if machine.meter is not None:
                machine.meter.steps_done(num_steps, self._clock())
        for id in recorded.published:
            job = await asyncio.to_thread(self._transitions.job, id)
            if job.settings["live"] and not job.is_terminal:
                self._adapters.add_live(job)
        if recorded.num_checkpoints:
            self._adapters.changed()
        for id, error in recorded.ended.items():
            if error is not None:
                await self.end(id, "failed", {"code": "training_failed", "message": error, "param": None})
        for id in recorded.left:
            if id in self._machines:
                self.machine(id).holding = "ended" if id in recorded.ended else "nothing"
                self.machine(id).has_succeeded = id in recorded.ended
        for id in [id for id, machine in self._machines.items() if machine.has_succeeded]:
            # A job has succeeded when its last checkpoint is there.
            if await self._in_store(self._transitions.has_last_checkpoint, id):
                await self.end(id, "succeeded")

    def _is_here(self, id: str) -> bool:
        """Whether a job is the living engine's to report on."""
        return id in self._machines and self.machine(id).holding != "nothing"

    async def _lose_all(self) -> None:
        """The engine has died, and every job with it."""
        lost = [id for id in self._machines if self._is_here(id)]
        for machine in self._machines.values():
            machine.holding, machine.has_succeeded, machine.meter = "nothing", False, None
        self._adapters.remove_all_live()
        for id in await self._in_store(self._transitions.requeue, lost):
            await self._count_death(id)

    async def _count_death(self, id: str) -> None:
        machine = self.machine(id)
        machine.num_deaths += 1
        if machine.num_deaths == _MOST_DEATHS:
            message = f"the engine died {_MOST_DEATHS} times in a row without a step of this job being done"
            await self.end(id, "failed", {"code": "engine_died", "message": message, "param": None})

    # -- the loop -------------------------------------------------------------------

    async def reconcile_all(self) -> None:
        """Every job that has not ended."""
        for job in await self._in_store(self._transitions.unfinished):
            await self.reconcile(job.id)

    async def reconcile(self, id: str, wish: Wish | None = None) -> JobRecord:
        """Do what there is to do with a job, one step after the other; the job as it is then.

        wish: what a client asks for; without, what follows from the job's status.
        """
        while True:
            job = await self._in_store(self._transitions.job, id)
            if job.is_terminal:
                return job
            action = next_action(
                job.status,
                wish=wish or wish_of(job.status),
                holding=self.machine(id).holding,
                is_validated=job.validated,
            )
            if action is None or not await self._do(action, job):
                return await self._in_store(self._transitions.job, id)

    async def _do(self, action: Action, job: JobRecord) -> bool:
        """Whether it could be done; False: there is nothing to do now but wait."""
        if action == "read_files":
            self._read(job)
            return False
        if action == "start":
            return await self._start(job)
        if action.startswith("tell_"):
            await self._tell(action, job.id)
        elif action == "write_cancelled":
            self._reader.stop(job.id)
            await self.end(job.id, "cancelled")
        else:
            await self._write(action, job)
        return True

    def _read(self, job: JobRecord) -> None:
        if job.base == self._base:
            self._reader.begin(job)

    @property
    def _may_start(self) -> bool:
        """Whether there is an engine, and all of its fate so far has been taken in."""
        return self._engine_is_up and all(isinstance(item, Report) for item in self._inbox)

    async def _start(self, job: JobRecord) -> bool:
        """Have the engine run a queued job from its newest checkpoint."""
        if job.base != self._base or not self._may_start:
            return False
        checkpoint, is_done = await self._in_store(self._transitions.roll_back, job)
        self._adapters.changed()
        if is_done:
            await self.end(job.id, "succeeded")
            return True
        if not self._may_start:
            return False
        start = self._transitions.start_of(job, None if checkpoint is None else checkpoint.directory)
        machine = self.machine(job.id)
        machine.holding = "running"
        machine.resumed_step, machine.was_resumed = 0 if checkpoint is None else checkpoint.step, False
        self._measure_anew(job.id)
        try:
            await self._engine.start_job(start)
        except EngineGoneError:  # while it had the job; that the engine has died is in the inbox by now
            return False
        except CoserveError as error:
            await self._refused(job.id, str(error))
        except Exception as error:  # a bug; of this job, and the others must not wait for it
            _log.exception("job %s could not be started", job.id)
            await self._refused(job.id, f"the job could not be started: {error!r}")
        return True

    async def _refused(self, id: str, message: str) -> None:
        self.machine(id).holding = "nothing"
        await self.end(id, "failed", {"code": "job_refused", "message": message, "param": None})

    async def _tell(self, action: Action, id: str) -> None:
        """Tell the engine something about a job that it has, and take in what came of it."""
        machine = self.machine(id)
        if action == "tell_resume":
            self._measure_anew(id)
        try:
            if action == "tell_pause":
                await self._engine.pause_job(id)
                machine.holding = "paused"
            elif action == "tell_resume":
                await self._engine.resume_job(id)
                machine.holding, machine.was_resumed = "running", True
            else:
                await self._engine.cancel_job(id)
                machine.holding = "ended"
        except JobError:  # it has ended meanwhile
            machine.holding = "ended"
        except EngineGoneError:  # likewise, with the engine
            machine.holding = "nothing"
        finally:
            await self.settle()

    def _measure_anew(self, id: str) -> None:
        self.machine(id).meter = ProgressMeter(self._clock())
        self._recorder.begin(id)

    async def _write(self, action: Action, job: JobRecord) -> None:
        """A state of a job that has not ended, with the event that tells it."""
        machine = self.machine(job.id)
        status: JobStatus
        message: str | None = None
        if action == "write_paused":
            status, message, machine.meter = "paused", "Fine-tuning job paused", None
        elif action == "write_running":
            step = machine.resumed_step
            started = f"Fine-tuning resumes from step {step}" if step else "Fine-tuning job started"
            status, message = "running", "Fine-tuning job resumed" if machine.was_resumed else started
        else:
            status = "validating_files" if action == "write_validating" else "queued"
            message = "Fine-tuning job resumed" if job.status == "paused" else None
        await self._in_store(self._transitions.change, job.id, status, message)

    # -- other changes --------------------------------------------------------------

    async def files_read(self, id: str, found: Validated | JobError) -> None:
        """What is in a job's files is known."""
        job = await self._in_store(self._transitions.job, id)
        if job.is_terminal:
            await self._in_store(self._transitions.sweep, id)
        elif isinstance(found, JobError):
            await self.end(
                id, "failed", {"code": f"invalid_{found.param}", "message": str(found), "param": found.param}
            )
        else:
            await self._in_store(self._transitions.validated, job, found)
            await self.reconcile(id)

    async def end(
        self, id: str, status: Literal["succeeded", "failed", "cancelled"], error: dict[str, Any] | None = None
    ) -> None:
        """A job ends: what an engine may still say of it is too late."""
        job = await self._in_store(self._transitions.end, id, status, error)
        self._machines.pop(id, None)
        self._adapters.remove_live(job)
        self._adapters.changed()

    async def _in_store(self, do: Callable[..., _Result], *arguments: Any) -> _Result:
        """Do something that must not get lost: as often as it takes, if the database is away or the disk is full."""
        while True:
            try:
                return await asyncio.to_thread(do, *arguments)
            except (StoreError, OSError) as error:
                if self.is_closing:
                    raise
                _log.error("%s; it is tried again", error)
                await asyncio.sleep(_STORE_WAIT_S)
