"""Writes that the store reports as failed after it has done them, as when a connection breaks while
it commits."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from homes import TENANT, HandMade

from coserve.engine.commands import JobStart
from coserve.errors import CoserveError, StoreError
from coserve.jobs.datasets import validation
from coserve.jobs.datasets.validation import Validated
from coserve.jobs.lifecycle import store_retry
from coserve.jobs.manager import JobManager
from coserve.jobs.models import BaseModel, JobModels
from coserve.jobs.records import JobRecord
from coserve.jobs.settings import JobSettings


class Engine:
    """An engine that does what it is told at once, and notes it."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start_job(self, job: JobStart) -> None:
        self.commands.append("start")
        await self.may_start.wait()

    async def pause_job(self, id: str) -> None:
        self.commands.append("pause")

    async def resume_job(self, id: str) -> None:
        self.commands.append("resume")

    async def cancel_job(self, id: str) -> None:
        self.commands.append("cancel")


class Server:
    """Jobs of a home, with a store of which one write can fail before or after it is done."""

    def __init__(self, path: Path) -> None:
        self.home, self.engine = HandMade(path), Engine()
        self._next = ""
        write = self.home.store.write

        @contextmanager
        def unreliable() -> Iterator[Any]:
            mode, self._next = self._next, ""
            if mode == "before":
                raise StoreError("the store is away")
            with write() as transaction:
                yield transaction
            if mode == "after":
                raise StoreError("the connection broke at the commit")

        self.home.store.write = unreliable  # type: ignore[method-assign]

    async def start(self, max_running: int | None = None) -> None:
        self.manager = JobManager(
            store=self.home.store,
            files=self.home.files,
            directory=self.home.path / "jobs",
            engine=self.engine,
            models=JobModels(BaseModel(name="m", architecture=None, tokenizer=None)),
            max_running=max_running,
        )
        await self.manager.start()

    async def refused(self, ask: Callable[[], Awaitable[Any]], when: str = "after") -> None:
        """Have the next write fail, and a client that asks for something get the error."""
        self._next = when
        with pytest.raises(CoserveError):
            await ask()

    def fail_next_write(self) -> None:
        self._next = "after"

    async def settle(self) -> None:
        async def nothing() -> None:
            return None

        for _ in range(2):
            for _ in range(3):
                await asyncio.sleep(0)
                await self.manager.mailbox.call(nothing)
            await asyncio.sleep(0.05)  # until the store is tried again

    def status(self, job: JobRecord) -> str:
        with self.home.store.read() as transaction:
            found = transaction.any_job(job.id)
        assert found is not None
        return found.status

    def messages(self, job: JobRecord) -> list[str]:
        with self.home.store.read() as transaction:
            return [
                event.message
                for event in transaction.events(TENANT, job.id, after=None, limit=99).items
            ]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(store_retry, "_WAIT_S", 0.004)
    return Server(tmp_path)


def test_a_queued_job_whose_cancellation_is_in_doubt_is_never_started(server):
    async def go() -> None:
        job, other = server.home.job(status="queued"), server.home.job(status="queued")
        await server.start(max_running=1)
        await server.refused(lambda: server.manager.cancel(TENANT, job.id))
        server.manager.engine_ready()
        await server.settle()
        assert server.status(job) == "cancelled" and server.messages(job) == [
            "The job was cancelled"
        ]
        assert server.status(other) == "running" and server.engine.commands == ["start"]

    asyncio.run(go())


def test_a_job_whose_cancellation_is_in_doubt_stays_cancelled_when_its_files_have_been_read(
    server, monkeypatch
):
    may_end = Event()

    def validate(*arguments: Any) -> Validated:
        may_end.wait(10)
        return Validated(num_examples=3, num_tokens=9, num_steps=10, num_cut=0, warnings=())

    monkeypatch.setattr(validation, "validate", validate)

    async def go() -> None:
        job = server.home.job(status="validating_files", num_examples=0, num_steps=0)
        await server.start()
        await server.refused(lambda: server.manager.cancel(TENANT, job.id))
        may_end.set()
        await server.manager._reader.wait()
        server.manager.engine_ready()
        await server.settle()
        assert server.status(job) == "cancelled" and server.engine.commands == []

    asyncio.run(go())


def test_a_job_whose_creation_is_in_doubt_can_be_cancelled(server):
    async def go() -> None:
        await server.start()
        file = server.home.upload()
        await server.refused(
            lambda: server.manager.create(
                TENANT,
                model="m",
                base="m",
                training_file=file.id,
                validation_file=None,
                suffix=None,
                metadata=None,
                settings=JobSettings(),
                start=None,
            )
        )
        with server.home.store.read() as transaction:
            (job,) = transaction.unfinished_jobs()
        assert (await server.manager.cancel(TENANT, job.id)).status == "cancelled"

    asyncio.run(go())


def test_a_job_whose_pause_is_in_doubt_is_not_resumed(server):
    async def go() -> None:
        job = server.home.job(status="queued")
        await server.start()
        server.manager.engine_ready()
        await server.settle()
        await server.refused(lambda: server.manager.pause(TENANT, job.id))
        await server.settle()
        assert server.status(job) == "paused" and server.engine.commands == ["start", "pause"]

    asyncio.run(go())


def test_a_start_that_is_in_doubt_is_told_once(server):
    async def go() -> None:
        job = server.home.job(status="queued")
        await server.start()
        server.engine.may_start.clear()
        server.manager.engine_ready()
        await server.settle()
        server.fail_next_write()
        server.engine.may_start.set()
        await server.settle()
        assert server.status(job) == "running" and server.messages(job) == [
            "Fine-tuning job started"
        ]

    asyncio.run(go())


def test_a_paused_job_whose_resumption_failed_takes_no_slot(server):
    async def go() -> None:
        first, second = server.home.job(status="queued"), server.home.job(status="queued")
        await server.start(max_running=1)
        server.manager.engine_ready()
        await server.settle()
        running, waiting = (first, second) if server.status(first) == "running" else (second, first)
        await server.manager.pause(TENANT, running.id)
        await server.settle()
        assert server.status(waiting) == "running"
        await server.refused(lambda: server.manager.resume(TENANT, running.id), when="before")
        await server.settle()
        await server.manager.cancel(TENANT, waiting.id)
        await server.settle()
        assert [state.slot for state in server.manager._driver.jobs] == ["none"]

    asyncio.run(go())
