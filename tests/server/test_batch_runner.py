"""What becomes of a batch at awkward moments: with a store and files, and answers that the test
holds back."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from homes import TENANT, HandMade

from coserve.errors import EngineGoneError
from coserve.jobs.records import BATCH_OVER, BatchRecord, new_id
from coserve.server.batches.deaths import LineDeaths
from coserve.server.batches.files import BatchResults
from coserve.server.batches.journal import BatchJournal
from coserve.server.batches.lines import Answer, LineRequest
from coserve.server.batches.runner import BatchRunner
from coserve.server.errors import ApiError

CHAT = "/v1/chat/completions"
NOW = 1_000_000_000
ANSWERED = {"choices": list[Any]()}


class Home(HandMade):
    """Batches on disk."""

    def runner(self, answer: Answer) -> BatchRunner:
        """A server's."""
        directory = self.path / "batches"
        return BatchRunner(self.store, self.files, directory, answer=answer, most=lambda: 32)

    def batch(self, *ids: str, expires_at: int = 10 * NOW) -> BatchRecord:
        """One that asks these."""
        lines = [
            json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": {"id": id}})
            for id in ids
        ]
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
        return [
            json.loads(line)["custom_id"]
            for line in self.files.path(found).read_text().splitlines()
        ]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    yield made
    made.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


def has_completed_one(server: BatchRunner, batch: BatchRecord) -> bool:
    """Return whether one line of a batch that is under way has been answered."""
    return server.live(batch).num_completed == 1


async def until(question: Callable[[], bool]) -> None:
    while not question():
        await asyncio.sleep(0.01)


async def never() -> Any:
    await asyncio.Event().wait()


async def only_a(request: LineRequest) -> dict[str, Any]:
    """All others wait."""
    return ANSWERED if request.body["id"] == "a" else await never()


async def at_once(request: LineRequest) -> dict[str, Any]:
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
        second.start()
        done = await home.until_over(batch)
        assert (done.status, done.num_total, done.num_completed, done.num_failed) == (
            "failed",
            3,
            1,
            0,
        )
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
        assert (done.status, done.num_completed, home.ids(done.output_file)) == (
            "cancelled",
            1,
            ["a"],
        )
        await runner.close()
        assert (await runner.cancel(batch)).status == "cancelled", (
            "and as it ended, not as it was when it was found"
        )

    run(test)


def test_answers_that_are_being_written_when_the_window_ends_are_counted_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    add, ended, waiting = BatchResults.add, threading.Event(), asyncio.Event()

    def add_late(results: BatchResults, *arguments: Any) -> None:
        assert ended.wait(60)
        add(results, *arguments)

    async def answer(request: LineRequest) -> dict[str, Any]:
        if request.body["id"].startswith("late"):
            await waiting.wait()
            return ANSWERED
        waiting.set()
        try:
            return await never()
        finally:  # the window has ended, and the others are being written
            ended.set()

    async def test() -> None:
        monkeypatch.setattr(BatchResults, "add", add_late)
        asyncio.get_running_loop().set_default_executor(
            ThreadPoolExecutor(16)
        )  # all that write, and more
        late = {f"late {number}" for number in range(8)}
        batch = home.batch("lost", "lost too", *sorted(late), expires_at=int(time.time()) + 3)
        runner = home.runner(answer)
        runner.begin(batch)
        done = await home.until_over(batch)
        written, missing = home.ids(done.output_file), home.ids(done.error_file)
        assert sorted([*written, *missing]) == sorted([*late, "lost", "lost too"]), (
            "each is there once"
        )
        assert done.status == "expired" and {"lost", "lost too"} <= {*missing}
        assert (done.num_total, done.num_completed, done.num_failed) == (
            10,
            len(written),
            len(missing),
        )
        await runner.close()

    run(test)


def test_an_answer_that_is_being_written_when_a_batch_is_cancelled_is_counted(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    add, writing, asked, ended = (
        BatchResults.add,
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def add_late(results: BatchResults, *arguments: Any) -> None:
        writing.set()
        assert ended.wait(60)
        time.sleep(0.2)
        add(results, *arguments)

    async def answer(request: LineRequest) -> dict[str, Any]:
        if request.body["id"] == "b":
            asked.set()
        try:
            return await only_a(request)
        except asyncio.CancelledError:
            ended.set()
            raise

    async def test() -> None:
        monkeypatch.setattr(BatchResults, "add", add_late)
        batch = home.batch("a", "b")
        runner = home.runner(answer)
        runner.begin(batch)
        await until(lambda: writing.is_set() and asked.is_set())
        await runner.cancel(batch)
        done = await home.until_over(batch)
        assert (done.status, done.num_completed, home.ids(done.output_file)) == (
            "cancelled",
            1,
            ["a"],
        )
        await runner.close()

    run(test)


class Mortal:
    """An engine that dies of some lines, and loses all that are with it: a line is `{"id": …}`."""

    def __init__(self, *deadly: str) -> None:
        self.deadly, self.num_deaths = deadly, 0
        self.runner: BatchRunner | None = None
        self._with_it: list[asyncio.Future[None]] = []

    async def answer(self, request: LineRequest) -> dict[str, Any]:
        lost = asyncio.get_running_loop().create_future()
        self._with_it.append(lost)
        if request.body["id"] in self.deadly:
            await asyncio.sleep(0.05)
            self._die()
        with suppress(TimeoutError):
            await asyncio.wait_for(lost, 0.2)
            raise ApiError("the engine died", status=503) from EngineGoneError("the engine died")
        return ANSWERED

    def _die(self) -> None:
        assert self.runner is not None
        self.num_deaths += 1
        self.runner.engine_died()
        with_it, self._with_it = self._with_it, []
        for lost in with_it:
            if not lost.done():
                lost.set_result(None)


def error_of(home: Home, batch: BatchRecord, line: str) -> dict[str, Any]:
    """The error of a line of a batch that is over."""
    found = home.files.find(TENANT, batch.error_file or "")
    assert found is not None
    lines = map(json.loads, home.files.path(found).read_text().splitlines())
    return next(dict(each["error"]) for each in lines if each["custom_id"] == line)


def test_a_line_that_kills_engines_is_set_aside_and_no_line_of_another_batch_fails_for_it(
    home: Home,
):
    async def test() -> None:
        engine = Mortal("bad")
        runner = engine.runner = home.runner(engine.answer)
        innocent = [home.batch(*(f"{batch} {number}" for number in range(8))) for batch in range(3)]
        guilty = home.batch("x", "bad", "y")
        for batch in (*innocent, guilty):
            runner.begin(batch)
        for batch in innocent:
            done = await home.until_over(batch)
            assert (done.status, done.num_completed, done.num_failed) == ("completed", 8, 0)
        done = await home.until_over(guilty)
        assert (done.status, sorted(home.ids(done.output_file))) == ("completed", ["x", "y"])
        error = error_of(home, done, "bad")
        assert error["code"] == "engine_died" and "died" in error["message"]
        assert engine.num_deaths <= 5
        await runner.close()

    run(test)


def test_a_line_that_kills_servers_is_set_aside_at_the_next_start_and_its_batch_ends(home: Home):
    async def test() -> None:
        bad = home.batch("a", "bad", "c")
        other = home.batch(*(f"{number}" for number in range(5)))
        starts = 0
        while home.now(bad).status not in BATCH_OVER:
            starts += 1
            assert starts < 9, "it dies at each start"
            dead = asyncio.Event()

            async def answer(request: LineRequest, dead: asyncio.Event = dead) -> dict[str, Any]:
                if request.body["id"] == "bad":
                    dead.set()
                return await never() if dead.is_set() else ANSWERED

            server = home.runner(answer)
            before = asyncio.all_tasks()
            server.start()
            over = asyncio.create_task(home.until_over(bad))
            await asyncio.wait(
                [over, asyncio.create_task(dead.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            # As `kill -9` does it: nothing of the process is left, and it has said nothing. The
            # tasks of this one run until they are cancelled, but no longer reach the disk.
            survivors = home.path / "batches"
            saved = home.path / "saved"
            shutil.copytree(survivors, saved)
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await asyncio.sleep(0.05)
            shutil.rmtree(survivors)
            saved.rename(survivors)
        done = home.now(bad)
        assert (done.status, sorted(home.ids(done.output_file))) == ("completed", ["a", "c"])
        assert error_of(home, done, "bad")["code"] == "engine_died"
        assert starts <= 5
        last = home.runner(at_once)
        last.start()
        assert (await home.until_over(other)).num_completed == 5
        await last.close()

    run(test)


def test_lines_under_way_when_a_server_ends_in_good_order_are_charged_with_nothing(home: Home):
    async def test() -> None:
        batch = home.batch("a", "b")
        for _ in range(4):
            server = home.runner(only_a)
            server.start()
            await until(partial(has_completed_one, server, batch))
            await server.close()
        suspects = []

        async def answer(request: LineRequest) -> dict[str, Any]:
            suspects.append(request.is_suspect)
            return ANSWERED

        last = home.runner(answer)
        last.start()
        assert (await home.until_over(batch)).num_completed == 2
        assert suspects == [False]
        await last.close()

    run(test)


def test_a_start_drops_what_is_no_longer_of_use_in_a_journal(home: Home):
    async def test() -> None:
        batch = home.batch("a", "b")
        results = BatchResults(home.path / "batches" / batch.id)
        for _ in range(1000):
            results.journal.begin("a")
            results.journal.leave("a")
        results.journal.begin("b")
        server = home.runner(only_a)
        server.start()
        await until(partial(has_completed_one, server, batch))
        await until(
            lambda: BatchResults(home.path / "batches" / batch.id).journal.read()[0] == {"a", "b"}
        )
        assert (home.path / "batches" / batch.id / "under_way.jsonl").stat().st_size < 1000
        await server.close()
        assert results.journal.read() == (set(), {"b": LineDeaths(num=1, num_lines=1)})

    run(test)


def test_results_of_a_batch_that_was_over_when_its_server_was_killed_are_removed_at_the_next_start(
    home: Home,
):
    async def test() -> None:
        batch, left = home.batch("a"), home.path / "batches" / "batch_over"
        left.mkdir(parents=True)
        runner = home.runner(at_once)
        runner.start()
        await home.until_over(batch)
        await until(lambda: not list((home.path / "batches").iterdir()))
        await runner.close()

    run(test)


def test_a_batch_is_begun_once_however_its_request_and_the_start_meet(home: Home):
    async def test() -> None:
        asked = list[str]()

        async def answer(request: LineRequest) -> dict[str, Any]:
            asked.append(request.body["id"])
            return ANSWERED

        batch = home.batch("a", "b")
        runner = home.runner(answer)
        runner.start()
        runner.begin(batch)
        await home.until_over(batch)
        await runner.close()
        assert sorted(asked) == ["a", "b"]

    run(test)


def test_a_batch_that_is_begun_while_others_are_resumed_is_charged_with_no_death(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    async def test() -> None:
        asked, may_read = set[str](), threading.Event()
        read = BatchJournal.read

        def slow_read(journal: BatchJournal) -> tuple[set[str], dict[str, LineDeaths]]:
            """Take as long as a large journal, or a slow disk, does."""
            assert may_read.wait(30)
            return read(journal)

        async def answer(request: LineRequest) -> dict[str, Any]:
            asked.add(request.body["id"])
            return await never()

        monkeypatch.setattr(BatchJournal, "read", slow_read)
        _, new = home.batch("old"), home.batch("new")
        runner = home.runner(answer)
        runner.start()
        await until(lambda: any((home.path / "batches").iterdir()))
        runner.begin(new)
        with suppress(TimeoutError):
            await asyncio.wait_for(until(lambda: "new" in asked), 0.3)
        may_read.set()
        await until(lambda: asked == {"old", "new"})
        await runner.close()
        assert BatchResults(home.path / "batches" / new.id).journal.read() == (set(), {})

    run(test)
