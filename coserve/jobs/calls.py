"""Commands to the engine about jobs: nobody waits for their answers, which come in like its reports."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from coserve.engine.commands import JobStart
from coserve.errors import EngineGoneError
from coserve.jobs.machine import Answer, JobMachine, Lives, Told
from coserve.jobs.messages import JobEngine
from coserve.jobs.state import Action


class EngineCalls:
    """Belongs to one event loop. lives: of engines, with those whose death has not been settled yet."""

    def __init__(self, engine: JobEngine, answered: Callable[[Answer], None]) -> None:
        self._engine, self._put = engine, answered
        self.lives = Lives()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> Sequence["asyncio.Task[None]"]:
        """What the engine has not answered yet."""
        return tuple(self._calls)

    def start(self, machine: JobMachine, job: JobStart, *, life: int) -> None:
        """Have the engine run a job. life: the one that this was decided for."""
        self._call(machine, Told(job=job.id, action="start", life=life), lambda: self._engine.start_job(job))

    def tell(self, machine: JobMachine, action: Action, id: str, *, life: int) -> None:
        """Tell it something about a job that it has."""
        verbs = {
            "tell_pause": self._engine.pause_job,
            "tell_resume": self._engine.resume_job,
            "tell_cancel": self._engine.cancel_job,
        }
        self._call(machine, Told(job=id, action=action, life=life), lambda: verbs[action](id))

    async def close(self) -> None:
        """Wait for no answer any more."""
        for call in self.open:
            call.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)

    def _call(self, machine: JobMachine, told: Told, do: Callable[[], Awaitable[None]]) -> None:
        machine.told = told
        call = asyncio.create_task(self._await_answer(told, do))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _await_answer(self, told: Told, do: Callable[[], Awaitable[None]]) -> None:
        error: Exception | None = None
        try:
            if told.life != self.lives.of(told.job):
                raise EngineGoneError("the engine has died")
            await do()
        except Exception as raised:
            error = raised
        self._put(Answer(told=told, error=error))
