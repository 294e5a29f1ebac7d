"""Properties of every kind of database, SQLite and a real PostgreSQL: limits under races, one
moment for a query, a server that goes away and comes back.
"""

import io
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest
from postgres import Postgres
from sqlalchemy.pool import QueuePool

from coserve.errors import LimitError, StoreError
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.folders import Folders
from coserve.jobs.lifecycle.job_writer import JobWriter
from coserve.jobs.records import FileRecord, JobRecord
from coserve.jobs.sql.databases import database_url
from coserve.jobs.sql.store import Store
from coserve.settings import without_password

NUM_THREADS, MOST = 6, 3


@pytest.fixture
def store(database):
    made = Store(database)
    yield made
    made.close()


def file(id: str) -> FileRecord:
    return FileRecord(
        id=id, tenant="a", purpose="fine-tune", filename="f", num_bytes=1, created_at=1
    )


def at_once(do: Callable[[int], None]) -> list[Exception]:
    """Have threads do it; what they raised."""
    barrier, raised = threading.Barrier(NUM_THREADS), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            do(number)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_a_tenants_jobs_are_counted_and_added_as_one(store, tmp_path):
    writer = JobWriter(store, Files(store, tmp_path / "files"), Folders(tmp_path / "jobs"))
    with store.write() as transaction:
        transaction.add_file(file("file-1"))

    def add(number: int) -> None:
        given: dict[str, Any] = {
            "created_at": 1,
            "model": "m",
            "base": "m",
            "status": "validating_files",
            "seed": 0,
        }
        id = f"ftjob-{number}"
        writer.add(
            JobRecord(id=id, name=id, tenant="a", training_file="file-1", settings={}, **given),
            MOST,
        )

    raised = at_once(add)
    assert [type(error) for error in raised] == [LimitError] * (NUM_THREADS - MOST), raised
    with store.read() as transaction:
        assert transaction.num_unfinished_jobs("a") == MOST


def test_a_tenants_bytes_are_counted_and_added_as_one(store, tmp_path):
    files = Files(store, tmp_path / "files")

    def add(number: int) -> None:
        files.create(
            "a",
            purpose="batch",
            filename="f",
            source=io.BytesIO(b"x" * 10),
            max_total_bytes=10 * MOST,
        )

    raised = at_once(add)
    assert [type(error) for error in raised] == [LimitError] * (NUM_THREADS - MOST), raised
    assert len(list((tmp_path / "files").iterdir())) == MOST, "of what was refused, nothing is left"


def test_questions_see_one_moment_and_wait_for_no_writer(store):
    with store.write() as writing:
        writing.add_file(file("f1"))
    with store.read() as reading:
        assert reading.file_bytes("a") == 1
        with store.write() as writing:
            writing.add_file(file("f2"))
            writing.file_bytes("a")  # sends it
            assert reading.file_bytes("a") == 1, "what is not committed is not seen"
        assert reading.file_bytes("a") == 1, "nor what was committed after the first question"
    with store.read() as reading:
        assert reading.file_bytes("a") == 2


def test_two_servers_that_start_at_once_make_the_tables_once(database):
    stores = []
    assert at_once(lambda _: stores.append(Store(database))) == []
    for made in stores:
        made.close()


def test_one_that_another_server_is_just_making_is_waited_for(tmp_path):
    """SQLite itself refuses at once."""
    with closing(
        sqlite3.connect(tmp_path / "new.db", isolation_level=None, check_same_thread=False)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        done = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        done.start()
        Store(f"sqlite:///{tmp_path}/new.db").close()
        done.join()


def test_a_database_belongs_to_one_home(database, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for _ in range(2):
        Store.at(first, database).close()
    with pytest.raises(
        StoreError, match=rf"another home, {first} of .*write (home-\w+) to {second}/home-id"
    ):
        Store.at(second, database)
    moved = tmp_path / "moved"
    first.rename(moved)
    Store.at(moved, database).close()


# -- PostgreSQL alone --------------------------------------------------------------------------


def test_a_server_that_goes_away_is_an_error_and_one_that_comes_back_is_used(postgres: Postgres):
    store = Store(postgres.new_database())
    with store.write() as transaction:
        transaction.add_file(file("f1"))
    away = ExitStack()

    def cut_short() -> None:
        with store.write() as transaction:
            transaction.add_file(file("f2"))
            transaction.file_bytes("a")
            away.enter_context(postgres.away())

    with away:
        with pytest.raises(StoreError, match="cannot be used now"):
            cut_short()
        for use in (store.read, store.write):
            with pytest.raises(StoreError, match="cannot be used now"), use() as transaction:
                transaction.file_ids()
    with store.write() as transaction:
        assert transaction.file_ids() == {"f1"}, "what was cut short has not happened"
        transaction.add_file(file("f3"))
    with store.read() as transaction:
        assert transaction.file_ids() == {"f1", "f3"}
    store.close()


def test_idle_connections_that_were_cut_are_replaced(postgres: Postgres):
    store = Store(postgres.new_database())
    at_once(lambda _: _ask(store))
    with postgres.away():
        pass
    assert at_once(lambda _: _ask(store)) == []
    store.close()


def test_connections_are_few_and_calls_wait_for_them(postgres: Postgres):
    url = postgres.new_database()
    store = Store(url)
    assert at_once(lambda _: _ask(store, times=20)) == []
    (number,) = postgres.execute(
        "postgres", "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'coserve'"
    )
    assert 1 <= number[0] <= NUM_THREADS
    pool = store._writing.pool
    assert isinstance(pool, QueuePool)
    assert pool.size() + pool._max_overflow == 15, "docs/server.md says so"
    store.close()


def _ask(store: Store, times: int = 1) -> None:
    for _ in range(times):
        for use in (store.write, store.read):
            with use() as transaction:
                transaction.file_bytes("a")


def test_urls(postgres: Postgres, monkeypatch):
    url = postgres.new_database()
    Store(url.replace("postgresql://", "postgres://")).close()
    with pytest.raises(
        StoreError, match=r"coserve:\*\*\*@.*password authentication failed"
    ) as caught:
        Store(url.replace("not%20for%20others", "hunter2"))
    assert "hunter2" not in str(caught.value)
    assert (
        without_password("postgresql://h/d?user=u&password=p&x=1")
        == "postgresql://h/d?user=u&password=***&x=1"
    )
    with (
        postgres.away(),
        pytest.raises(StoreError, match=r"cannot be opened.*Is the server running"),
    ):
        Store(url)
    monkeypatch.delenv("COSERVE_DATABASE", raising=False)
    assert database_url() is None
    monkeypatch.setenv("COSERVE_DATABASE", url)
    assert (database_url(), database_url("sqlite://")) == (url, "sqlite://")


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install 'coserve\[postgresql\]'"):
        Store("postgresql://localhost/none")
