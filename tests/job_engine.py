"""A real engine in a thread, as the jobs' manager sees one: it takes commands, tells what happened,
and dies when it is told to, with everything that it had not said yet."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engines import make_engine, word_tokenizer
from random_plans import random_policy
from support import make_backbone

import coserve.errors
from coserve.engine.commands import CancelJob, JobStart, PauseJob, ResumeJob, StartJob
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.errors import CoserveError, EngineGoneError
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.shared_files import SharedFiles
from coserve.jobs.manager import JobManager
from coserve.jobs.models import BaseModel, JobModels
from coserve.jobs.records import DEFAULT_TENANT, JobRecord
from coserve.jobs.settings import job_settings
from coserve.jobs.sql.store import Store
from coserve.protocol.messages import CallReply
from coserve.tuning.objectives import SUPERVISED
from coserve.worker.job_commands import JobCommands

TENANT = DEFAULT_TENANT
LIMIT_S = 240.0  # for slow machines that do other things, too


class EngineThread:
    """One life of an engine. Implements `JobEngine`."""

    def __init__(
        self, listener: JobManager, *, seed: int = 0, most_steps: int | None = None
    ) -> None:
        """most_steps: it dies after this many."""
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._seed, self._most_steps = seed, most_steps
        self.is_alive = True
        self.engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        listener.engine_ready()

    def kill(self, *, tell: bool = True, under_way: tuple[str, ...] | None = ()) -> None:
        """It says nothing any more. tell: the manager that it has died; under_way: of these jobs,
        if of any."""
        if self.is_alive:
            self.is_alive = False
            self._commands.put(None)
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(EngineGoneError("the engine has died"))
            if tell:
                self._listener.engine_gone(under_way)

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    async def start_job(self, job: JobStart) -> None:
        await self._call(StartJob, job)

    async def pause_job(self, job: str) -> None:
        await self._call(PauseJob, job)

    async def resume_job(self, job: str) -> None:
        await self._call(ResumeJob, job)

    async def cancel_job(self, job: str) -> None:
        await self._call(CancelJob, job)

    async def _call(self, kind: Callable[..., Any], *fields: Any) -> None:
        if not self.is_alive:
            raise EngineGoneError("the engine is starting")
        number = next(self._numbers)
        call = self._calls[number] = self._loop.create_future()
        self._commands.put(kind(number, *fields))
        await call

    # -- on the thread ----------------------------------------------------------------

    def _run(self) -> None:
        engine = self.engine = make_engine(tokenizer=word_tokenizer())
        engine.policy = random_policy(self._seed)
        jobs = JobCommands(engine)
        num_steps = 0
        while self.is_alive:
            self._handle(jobs, wait=not engine.has_work and not jobs.is_waiting)
            events = [event for event in engine.step() if isinstance(event, JobEvent)]
            num_steps += 1
            if events:
                jobs.take(events)
            self._tell(jobs)
            if num_steps == self._most_steps:
                self._on_loop(self.kill)
                break
        jobs.close()

    def _handle(self, jobs: JobCommands, *, wait: bool) -> None:
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            if command is None:
                return
            try:
                jobs.handle(command)
            except CoserveError as error:
                self._on_loop(
                    self._reply, CallReply(command.call, str(error), type(error).__name__)
                )

    def _tell(self, jobs: JobCommands) -> None:
        news = jobs.take_pending()
        if news:
            self._on_loop(self._take, news)

    def _on_loop(self, do: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(do, *arguments)
        except RuntimeError:  # the loop is closed
            self.is_alive = False

    def _take(self, news: Any) -> None:
        if not self.is_alive:
            return
        self._listener.engine_reported(news.events, news.checkpoints)
        for reply in news.replies:
            self._reply(reply)

    def _reply(self, reply: CallReply) -> None:
        call = self._calls.pop(reply.call)
        if call.done():
            return
        if reply.error is None:
            call.set_result(None)
        else:
            call.set_exception(getattr(coserve.errors, str(reply.kind))(reply.error))


class Link:
    """The engine that lives now."""

    def __init__(self) -> None:
        self.engine: Any = None

    def __getattr__(self, verb: str) -> Any:
        async def call(argument: Any) -> None:
            if self.engine is None:
                raise EngineGoneError("the engine is starting")
            await getattr(self.engine, verb)(argument)

        return call


class World:
    """A server's jobs, without the server."""

    def __init__(
        self,
        home: Path,
        database: str | None = None,
        shared: SharedFiles | None = None,
        **manager: Any,
    ) -> None:
        """manager: settings of the `JobManager`."""
        self.home, self.link = home, Link()
        self.store = Store.at(home, database)
        self.files = Files(self.store, home / "files", shared=shared)
        self.manager = JobManager(
            store=self.store,
            files=self.files,
            directory=home / "jobs",
            engine=self.link,
            **{"models": JobModels(base_model()), **manager},
        )

    def live(self, **settings: Any) -> EngineThread:
        """A fresh engine."""
        engine = self.link.engine = EngineThread(self.manager, **settings)
        return engine

    def upload(self, content: bytes, tenant: str = TENANT, purpose: str = "fine-tune") -> str:
        from io import BytesIO

        record = self.files.create(
            tenant, purpose=purpose, filename="data.jsonl", source=BytesIO(content)
        )
        return record.id

    async def create(self, content: bytes, *, tenant: str = TENANT, **named: Any) -> JobRecord:
        """A job on this data; named: of `job_settings` and `JobManager.create`."""
        return await self.create_from(
            await asyncio.to_thread(self.upload, content, tenant), tenant=tenant, **named
        )

    async def create_from(self, file: str, *, tenant: str = TENANT, **named: Any) -> JobRecord:
        """A job on a file."""
        settings = {
            "hyperparameters": named.pop("hyperparameters", {}),
            "extension": named.pop("extension", {}),
            "seed": named.pop("seed", 4),
            "objective": named.pop("objective", SUPERVISED),
        }
        start = named.pop("start", None)
        made = job_settings(
            **settings, architecture=base_model().architecture, is_fresh=start is None
        )
        given = {
            "model": "small",
            "base": "small",
            "validation_file": None,
            "suffix": None,
            "metadata": None,
            "start": start,
        } | named
        return await self.manager.create(tenant, training_file=file, settings=made, **given)

    def job(self, id: str, tenant: str = TENANT) -> JobRecord:
        with self.store.read() as transaction:
            found = transaction.job(tenant, id)
        assert found is not None
        return found

    def events(self, id: str, tenant: str = TENANT) -> list[Any]:
        """The oldest first."""
        with self.store.read() as transaction:
            return list(reversed(transaction.events(tenant, id, after=None, limit=10_000).items))

    def checkpoints(self, id: str, tenant: str = TENANT) -> list[Any]:
        """Return the listed checkpoints of a job, the oldest first."""
        with self.store.read() as transaction:
            return list(
                reversed(transaction.checkpoints(tenant, id, after=None, limit=10_000).items)
            )

    async def until(self, question: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Ask until the answer is true; what it is."""
        async with asyncio.timeout(limit_s):
            while not (answer := question()):
                await asyncio.sleep(0.005)
        return answer

    async def abandon(self) -> None:
        """Cancel everything under way, as if the process had ended."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def until_step(self, id: str, step: int) -> None:
        await self.until(lambda: self.job(id).num_steps_done >= step)

    async def until_over(self, id: str) -> JobRecord:
        await self.until(lambda: self.job(id).is_terminal)
        return self.job(id)


def base_model() -> BaseModel:
    return BaseModel(
        name="small", architecture=make_backbone().architecture, tokenizer=word_tokenizer()
    )


@asynccontextmanager
async def world(
    home: Path,
    *,
    alive: bool = True,
    database: str | None = None,
    manager: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A manager, and an engine if it is alive; all ends with it. database: SQLite in the home by
    default."""
    made = World(home, database, **(manager or {}))
    await made.manager.start()
    if alive:
        made.live(**settings)
    try:
        yield made
    finally:
        engine = made.link.engine
        if engine is not None:
            engine.kill()
            engine.join()
        await made.manager.close()
        made.store.close()
