"""What becomes of a batch at awkward moments: with a store and files, and answers that the test holds back."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from homes import TENANT, HandMade

from coserve.jobs.records import BATCH_OVER, BatchRecord, new_id
from coserve.server.batch_files import BatchResults
from coserve.server.batch_runner import Answer, BatchRunner

CHAT = "/v1/chat/completions"
NOW = 1_000_000_000
ANSWERED = {"choices": list[Any]()}


class Home(HandMade):
    """Batches on disk."""

    def runner(self, answer: Answer) -> BatchRunner:
        """A server's."""
        directory = self.path / "batches"
        return BatchRunner(self.store, self.files, directory, answer=answer, is_ready=lambda: True, most=lambda: 32)

    def batch(self, *ids: str, expires_at: int = 10 * NOW) -> BatchRecord:
        """One that asks these."""
        lines = [json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": {"id": id}}) for id in ids]
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=TENANT,
            created_at=NOW,
            expires_at=expires_at,
            status="validating",
            endpoint=CHAT,
            input_file=self.upload("\n".join(lines).encode(), "batch").id,
            window="24h",
        )
        with self.store.write() as transaction:
            transaction.add_batch(record)
        return record

    def now(self, batch: BatchRecord) -> BatchRecord:
        """As it is written down."""
        with self.store.read() as transaction:
            found = transaction.batch(TENANT, batch.id)
        assert found is not None
        return found

    async def until_over(self, batch: BatchRecord) -> BatchRecord:
        while (found := self.now(batch)).status not in BATCH_OVER:
            await asyncio.sleep(0.01)
        return found

    def ids(self, file: str | None) -> list[str]:
        """The requests in an output or error file."""
        found = None if file is None else self.files.find(TENANT, file)
        if found is None:
            return []
        return [json.loads(line)["custom_id"] for line in self.files.path(found).read_text().splitlines()]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    yield made
    made.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


async def until(question: Callable[[], bool]) -> None:
    while not question():
        await asyncio.sleep(0.01)


async def never() -> Any:
    await asyncio.Event().wait()


async def only_a(endpoint: str, body: Any, tenant: str, due_s: float) -> dict[str, Any]:
    """All others wait."""
    return ANSWERED if body["id"] == "a" else await never()


async def at_once(endpoint: str, body: Any, tenant: str, due_s: float) -> dict[str, Any]:
    return ANSWERED


def delete_record(home: Home, file: str) -> None:
    assert home.files.delete(TENANT, file)


def lose_blob(home: Home, file: str) -> None:
    home.files.remove_blob(file)


@pytest.mark.parametrize("lose", [delete_record, lose_blob])
def test_a_batch_whose_input_is_gone_at_the_next_start_fails_and_keeps_what_was_answered(
    home: Home, lose: Callable[[Home, str], None]
):
    async def test() -> None:
        batch = home.batch("a", "b", "c")
        first = home.runner(only_a)
        first.begin(batch)
        await until(lambda: first.live(batch).num_completed == 1)
        await first.close()
        lose(home, batch.input_file)
        second = home.runner(at_once)
        await second.start()
        done = await home.until_over(batch)
        assert (done.status, done.num_total, done.num_completed, done.num_failed) == ("failed", 3, 1, 0)
        assert "failed_at" in done.times and "completed_at" not in done.times
        [error] = done.errors or []
        assert batch.input_file in error["message"] and error["param"] == "input_file_id"
        assert home.ids(done.output_file) == ["a"] and done.error_file is None
        await second.close()

    run(test)


def test_several_can_cancel_a_batch_at_once(home: Home):
    async def test() -> None:
        batch = home.batch("a", "b", "c")
        runner = home.runner(only_a)
        runner.begin(batch)
        await until(lambda: runner.live(batch).num_completed == 1)
        found = await asyncio.gather(*(runner.cancel(batch) for _ in range(5)))
        assert {each.status for each in found} <= {"cancelling", "cancelled"}
        done = await home.until_over(batch)
        assert (done.status, done.num_completed, home.ids(done.output_file)) == ("cancelled", 1, ["a"])
        await runner.close()
        assert (await runner.cancel(batch)).status == "cancelled", "and as it ended, not as it was when it was found"

    run(test)


def test_answers_that_are_being_written_when_the_window_ends_are_counted_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    add, ended, waiting = BatchResults.add, threading.Event(), asyncio.Event()

    def add_late(results: BatchResults, *arguments: Any) -> None:
        assert ended.wait(60)
        add(results, *arguments)

    async def answer(endpoint: str, body: Any, tenant: str, due_s: float) -> dict[str, Any]:
        if body["id"].startswith("late"):
            await waiting.wait()
            return ANSWERED
        waiting.set()
        try:
            return await never()
        finally:  # the window has ended, and the others are being written
            ended.set()

    async def test() -> None:
        monkeypatch.setattr(BatchResults, "add", add_late)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))  # all that write, and more
        late = {f"late {number}" for number in range(8)}
        batch = home.batch("lost", "lost too", *sorted(late), expires_at=int(time.time()) + 3)
        runner = home.runner(answer)
        runner.begin(batch)
        done = await home.until_over(batch)
        written, missing = home.ids(done.output_file), home.ids(done.error_file)
        assert sorted([*written, *missing]) == sorted([*late, "lost", "lost too"]), "each is there once"
        assert done.status == "expired" and {"lost", "lost too"} <= {*missing}
        assert (done.num_total, done.num_completed, done.num_failed) == (10, len(written), len(missing))
        await runner.close()

    run(test)


def test_an_answer_that_is_being_written_when_a_batch_is_cancelled_is_counted(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    add, writing, ended = BatchResults.add, threading.Event(), threading.Event()

    def add_late(results: BatchResults, *arguments: Any) -> None:
        writing.set()
        assert ended.wait(60)
        time.sleep(0.2)
        add(results, *arguments)

    async def answer(endpoint: str, body: Any, tenant: str, due_s: float) -> dict[str, Any]:
        try:
            return await only_a(endpoint, body, tenant, due_s)
        except asyncio.CancelledError:
            ended.set()
            raise

    async def test() -> None:
        monkeypatch.setattr(BatchResults, "add", add_late)
        batch = home.batch("a", "b")
        runner = home.runner(answer)
        runner.begin(batch)
        await until(writing.is_set)
        await runner.cancel(batch)
        done = await home.until_over(batch)
        assert (done.status, done.num_completed, home.ids(done.output_file)) == ("cancelled", 1, ["a"])
        await runner.close()

    run(test)
