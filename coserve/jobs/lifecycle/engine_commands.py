"""Commands to the engine about jobs: nobody waits for the answers, which come as events."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from coserve.engine.commands import JobStart
from coserve.errors import EngineGoneError
from coserve.jobs.lifecycle.events import Command, EngineAnswered, PendingCommand
from coserve.jobs.messages import JobEngine


class EngineCommands:
    """Belongs to one event loop."""

    def __init__(
        self,
        engine: JobEngine,
        answered: Callable[[EngineAnswered], None],
        is_current: Callable[[str, PendingCommand], bool],
    ) -> None:
        """Set what is called with each answer, and what says whether a job's engine is still the
        one that a command was decided for: no other is told.
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

    def tell(self, job: str, pending: PendingCommand) -> None:
        """Send a command about a job that the engine has."""
        verbs: dict[Command, Callable[[str], Awaitable[None]]] = {
            "pause": self._engine.pause_job,
            "resume": self._engine.resume_job,
            "cancel": self._engine.cancel_job,
        }
        self._call(job, pending, lambda: verbs[pending.command](job))

    async def close(self) -> None:
        """Wait for no answer any more."""
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
            if not self._is_current(job, pending):
                raise EngineGoneError("the engine has died")
            await do()
        except Exception as raised:
            error = raised
        self._answered(EngineAnswered(job=job, command=pending, error=error))
