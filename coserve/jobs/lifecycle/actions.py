"""Executor of planned actions: it does what the plan says with one job, and applies the events that
follow.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from math import inf
from typing import Literal

from coserve.engine.commands import JobStart
from coserve.errors import EngineGoneError
from coserve.jobs.datasets.validation import FileReader
from coserve.jobs.deaths import MAX_DEATHS
from coserve.jobs.lifecycle.catalogue import JobAdapters
from coserve.jobs.lifecycle.events import (
    Command,
    CommandSent,
    EngineAnswered,
    EngineEvent,
    JobFailed,
    PendingCommand,
    ReadingBegan,
    RecordWritten,
    TimeUp,
)
from coserve.jobs.lifecycle.job_writer import JobWriter
from coserve.jobs.lifecycle.live_jobs import LiveJobs
from coserve.jobs.lifecycle.plan import (
    Action,
    ReadFiles,
    RequestSlot,
    SendCommand,
    Start,
    Write,
    event_message,
)
from coserve.jobs.lifecycle.state import JobState
from coserve.jobs.messages import JobEngine
from coserve.jobs.models import JobModels
from coserve.jobs.records import JobRecord

# A job that has caused too many engine deaths is not started again.
TOO_MANY_DEATHS = JobFailed(
    code="engine_died",
    message=(
        f"the engine died, or stood still, {MAX_DEATHS} times while it worked for this job alone"
    ),
)


class JobActions:
    """Executor of the actions of `coserve.jobs.lifecycle.plan`, for use in the mailbox's task
    alone.

    An action that the store cannot write is undone and raises StoreError or OSError.
    """

    def __init__(
        self,
        jobs: LiveJobs,
        *,
        writer: JobWriter,
        adapters: JobAdapters,
        reader: FileReader,
        engine: JobEngine,
        models: JobModels,
        clock: Callable[[], float],
        timeout_s: float,
        put: Callable[[EngineEvent], None],
    ) -> None:
        """Connect the jobs with the store, the engine and the clock.

        Args:
            timeout_s: Longest time that a job may run.
            put: Receives the events that follow from commands and from elapsed time.
        """
        self._jobs, self._writer, self._adapters, self._reader = jobs, writer, adapters, reader
        self._models, self._clock, self._timeout_s, self._put = models, clock, timeout_s, put
        self._commands = _EngineCommands(engine, put, jobs.is_current)
        self._numbers = count()

    @property
    def open_commands(self) -> Sequence["asyncio.Task[None]"]:
        """Commands that the engine has not answered yet."""
        return self._commands.open

    async def close(self) -> None:
        """Cancel the wait for all open answers."""
        await self._commands.close()

    async def do(self, action: Action, state: JobState) -> JobRecord | None:
        """Do one action and apply the events that follow; return the job if this has ended it."""
        id = state.id
        match action:
            case ReadFiles():
                self._reader.begin(state.job)
                self._jobs.apply(id, ReadingBegan())
            case RequestSlot():
                self._jobs.request_slot(id)
            case Start():
                return await self._start(id)
            case SendCommand(command=command):
                if command == "cancel":  # cannot be undone, so its record must fit into the store
                    await asyncio.to_thread(self._writer.require_room, id)
                self.send(id, command)
            case Write(status="succeeded" | "failed" | "cancelled" as status):
                return await self._end(id, status)
            case Write(status=status):
                job = await asyncio.to_thread(
                    self._writer.change, id, status, event_message(state, status)
                )
                self._jobs.apply(id, RecordWritten(job=job))
        return None

    def send(self, id: str, command: Command) -> None:
        """Send the engine a command about a job that it has."""
        self._commands.send(id, self._note(id, command))

    async def _start(self, id: str) -> JobRecord | None:
        """Have the engine run a queued job from its newest checkpoint."""
        point = await asyncio.to_thread(self._writer.roll_back, id)
        if point.are_deaths_too_many:
            self._jobs.apply(id, TOO_MANY_DEATHS)
            return None
        self._jobs.apply(id, RecordWritten(job=point.job))
        # The catalogue may have cached adapters of checkpoints that were rolled back.
        self._adapters.changed()
        if point.is_done:
            return await self._end(id, "succeeded")
        if self._jobs.can_start(id):  # no engine has died meanwhile
            start = self._writer.start_of(point, model=self._models.engine_name(point.job.base))
            step = 0 if point.checkpoint is None else point.checkpoint.step
            self._commands.start(
                start, self._note(id, "start", resumed_step=step, listed_step=point.listed_step)
            )
        return None

    def _note(
        self, id: str, command: Command, resumed_step: int = 0, listed_step: int | None = None
    ) -> PendingCommand:
        """Record that a command is being sent, and schedule the time limit of a job that starts to
        run.
        """
        pending = PendingCommand(
            command=command, number=next(self._numbers), epoch=self._jobs[id].epoch
        )
        now_s = self._clock()
        self._jobs.apply(
            id,
            CommandSent(
                command=pending, now_s=now_s, resumed_step=resumed_step, listed_step=listed_step
            ),
        )
        if self._timeout_s < inf and command in ("start", "resume"):
            left_s = max(0.0, self._timeout_s - self._jobs[id].ran_s(now_s))
            # Never cancelled: `JobDriver` checks the elapsed time when the event arrives.
            asyncio.get_running_loop().call_later(left_s, self._put, TimeUp(job=id))
        return pending

    async def _end(self, id: str, status: Literal["succeeded", "failed", "cancelled"]) -> JobRecord:
        """End a job in the store; later reports of the engine about it are ignored."""
        error = self._jobs[id].failure if status == "failed" else None
        job = await asyncio.to_thread(self._writer.end, id, status, error)
        self.let_go(job)
        return job

    def let_go(self, job: JobRecord) -> None:
        """Drop a job that has ended in the store from memory."""
        self._adapters.remove_live(job)
        self._adapters.changed()
        self._jobs.end(job)
        # All other ends come after the files were read.
        if job.status == "cancelled":
            self._reader.stop(job.id)


class _EngineCommands:
    """Commands that the engine has not answered yet.

    Answers arrive as events, so that no caller waits for them. Belongs to one event loop.
    """

    def __init__(
        self,
        engine: JobEngine,
        answered: Callable[[EngineAnswered], None],
        is_current: Callable[[str, PendingCommand], bool],
    ) -> None:
        """Connect the commands with an engine.

        Args:
            engine: Engine that runs the jobs.
            answered: Receives each answer.
            is_current: Returns whether a job's engine is still the one for which a command was
                planned; a command for an earlier engine is not sent.
        """
        self._engine, self._answered, self._is_current = engine, answered, is_current
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> Sequence["asyncio.Task[None]"]:
        """Commands that the engine has not answered yet."""
        return tuple(self._calls)

    def start(self, job: JobStart, pending: PendingCommand) -> None:
        """Have the engine run a job."""
        self._call(job.id, pending, lambda: self._engine.start_job(job))

    def send(self, job: str, pending: PendingCommand) -> None:
        """Send a command about a job that the engine has."""
        verbs: dict[Command, Callable[[str], Awaitable[None]]] = {
            "pause": self._engine.pause_job,
            "resume": self._engine.resume_job,
            "cancel": self._engine.cancel_job,
        }
        self._call(job, pending, lambda: verbs[pending.command](job))

    async def close(self) -> None:
        """Cancel the wait for all open answers."""
        for call in self.open:
            call.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)

    def _call(self, job: str, pending: PendingCommand, do: Callable[[], Awaitable[None]]) -> None:
        call = asyncio.create_task(self._await_answer(job, pending, do))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _await_answer(
        self, job: str, pending: PendingCommand, do: Callable[[], Awaitable[None]]
    ) -> None:
        error: Exception | None = None
        try:
            # The engine may have died between the plan and the first step of this task.
            if not self._is_current(job, pending):
                raise EngineGoneError("the engine has died")
            await do()
        except Exception as raised:
            error = raised
        self._answered(EngineAnswered(job=job, command=pending, error=error))
