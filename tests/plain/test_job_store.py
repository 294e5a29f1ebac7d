"""The store of files and jobs, and blobs on disk."""

import io
import sqlite3
import threading
import time

import pytest

from coserve.engine.jobs.events import JobEvent
from coserve.errors import DataError, JobError, StoreError
from coserve.jobs.deaths import Deaths
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.folders import Folders
from coserve.jobs.lifecycle.events import EngineReported
from coserve.jobs.lifecycle.report_writer import JobReportWriter
from coserve.jobs.records import (
    AdapterRecord,
    CheckpointRecord,
    ConversationRecord,
    EventRecord,
    FileRecord,
    JobRecord,
    ResponseRecord,
)
from coserve.jobs.sql.store import Store


@pytest.fixture
def store(database):
    made = Store(database)
    yield made
    made.close()


def job(id="ftjob-1", tenant="a", **fields):
    given = {
        "created_at": 1,
        "model": "m",
        "base": "m",
        "name": f"ft:{id}",
        "status": "queued",
        "seed": 0,
    }
    return JobRecord(
        **{
            "id": id,
            "tenant": tenant,
            "training_file": "file-1",
            "settings": {"x": [1]},
            **given,
            **fields,
        }
    )


def event(id, step=None, job="ftjob-1", kind="step", **fields):
    kind = "" if step is None else kind
    return EventRecord(
        id=id, tenant="a", job=job, created_at=1, message=id, step=step, kind=kind, **fields
    )


def checkpoint(step, *, listed=True, id=None):
    id = id or f"ftckpt_{step}"
    return CheckpointRecord(
        id=id,
        tenant="a",
        job="ftjob-1",
        created_at=1,
        step=step,
        name=f"n{step}",
        directory=id,
        listed=listed,
    )


def test_records_come_out_as_they_went_in(store, database):
    file = FileRecord(
        id="file-1", tenant="a", purpose="p", filename="ü.jsonl", num_bytes=2**40, created_at=5
    )
    full = job(
        metadata={"k": "v"},
        start={"name": "n", "directory": None},
        error={"code": "c"},
        num_tokens=2**40,
    )
    plain = job("ftjob-2")
    happened = event("e1", 3, data={"loss": 0.5, "none": None}, level="warn")
    adapter = AdapterRecord(
        tenant="a", name="n", base="m", directory="/d", job="ftjob-1", created_at=2
    )
    with store.write() as transaction:
        transaction.add_file(file)
        transaction.add_job(full)
        transaction.add_job(plain)
        transaction.add_event(happened)
        transaction.put_checkpoint(checkpoint(3))
        transaction.put_adapter(adapter)
        transaction.put_deaths({"ftjob-1": Deaths(num=0, step=1)})
        transaction.put_deaths(
            {"ftjob-1": Deaths(num=1, step=2), "ftjob-2": Deaths(num=0, step=2**40)}
        )
        transaction.forget_deaths("ftjob-2")
    store.close()
    again = Store(database)
    with again.read() as transaction:
        assert transaction.file("a", "file-1") == file
        assert [transaction.job("a", each.id) for each in (full, plain)] == [full, plain]
        assert transaction.events("a", "ftjob-1", after=None, limit=9).items == (happened,)
        assert transaction.all_checkpoints("ftjob-1") == (checkpoint(3),)
        assert transaction.adapters("a", "m") == (adapter,)
        assert transaction.deaths() == {"ftjob-1": Deaths(num=1, step=2)}
    again.close()


def test_a_tenant_sees_only_its_own(store):
    with store.write() as transaction:
        transaction.add_file(
            FileRecord(id="f", tenant="a", purpose="p", filename="f", num_bytes=1, created_at=1)
        )
        transaction.add_job(job())
        transaction.add_event(event("e"))
        transaction.put_checkpoint(checkpoint(1))
        transaction.put_adapter(
            AdapterRecord(tenant="a", name="n", base="m", directory="d", created_at=1)
        )
    with store.write() as transaction:
        assert transaction.file("b", "f") is None
        assert not transaction.files(
            "b", purpose=None, after=None, limit=9, newest_first=True
        ).items
        assert not transaction.remove_file("b", "f")
        assert transaction.job("b", "ftjob-1") is None
        assert not transaction.jobs("b", after=None, limit=9).items
        assert not transaction.events("b", "ftjob-1", after=None, limit=9).items
        assert not transaction.checkpoints("b", "ftjob-1", after=None, limit=9).items
        assert transaction.adapter("b", "n") is None
        assert not transaction.adapters("b", "m")
        assert not transaction.remove_adapter("b", "n")
        for after in ("f", "nothing"):
            with pytest.raises(JobError, match="after names"):
                transaction.files("b", purpose=None, after=after, limit=9, newest_first=True)
        transaction.put_adapter(
            AdapterRecord(tenant="b", name="n", base="m", directory="e", created_at=1)
        )
    with store.read() as transaction:
        assert transaction.adapter("a", "n").directory == "d"
        assert transaction.adapter("b", "n").directory == "e"


def test_a_page_of_events_follows_an_event_of_the_same_job(store):
    with store.write() as transaction:
        for name in ("j1", "j2"):
            transaction.add_job(job(name))
            transaction.add_event(event(f"of {name}", job=name))
        assert not transaction.events("a", "j1", after="of j1", limit=9).items
        with pytest.raises(JobError, match="after names 'of j2', which is not there"):
            transaction.events("a", "j1", after="of j2", limit=9)


def test_lists_come_in_pages(store):
    with store.write() as transaction:
        for n in range(5):
            purpose = "x" if n % 2 else "y"
            transaction.add_file(
                FileRecord(
                    id=f"f{n}", tenant="a", purpose=purpose, filename="f", num_bytes=1, created_at=1
                )
            )
            transaction.add_job(
                job(f"j{n}", metadata={"n": str(n % 2), "quoted\"'": "it's"} if n else None)
            )

    def files(**asked):
        with store.read() as transaction:
            given = {"purpose": None, "after": None, "limit": 2, "newest_first": True} | asked
            page = transaction.files("a", **given)
        return [each.id for each in page.items], page.has_more

    assert files() == (["f4", "f3"], True)
    assert files(after="f3") == (["f2", "f1"], True)
    assert files(after="f1") == (["f0"], False)
    assert files(newest_first=False, after="f1", limit=3) == (["f2", "f3", "f4"], False)
    assert files(purpose="x") == (["f3", "f1"], False)

    def jobs(**asked):
        with store.read() as transaction:
            page = transaction.jobs("a", **({"after": None, "limit": 2} | asked))
        return [each.id for each in page.items], page.has_more

    assert jobs(metadata={"n": "0"}) == (["j4", "j2"], False)
    assert jobs(metadata={"n": "1"}, limit=1) == (["j3"], True)
    assert jobs(metadata={"n": "1", "quoted\"'": "it's"}, after="j3") == (["j1"], False)
    assert jobs(metadata={"m": "1"}) == ([], False)
    assert jobs(bare=True) == (["j0"], False)


def test_a_transaction_happens_whole_or_not_at_all(store):
    def half_done():
        with store.write() as transaction:
            transaction.add_job(job())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half_done()
    with store.read() as transaction:
        assert transaction.job("a", "ftjob-1") is None


def test_what_a_job_does_again_is_forgotten_first(store):
    with store.write() as transaction:
        transaction.add_job(job(num_steps_done=9))
        for step in range(1, 10):
            assert transaction.add_event(event(f"s{step}", step))
        assert transaction.add_event(event("v4", 4, kind="evaluation"))
        assert not transaction.add_event(event("again", 4)), "a step's metrics come once"
        transaction.add_event(event("words"))
        for step in (4, 8):
            transaction.put_checkpoint(checkpoint(step))
            name = f"n{step}"
            transaction.put_adapter(
                AdapterRecord(
                    tenant="a", name=name, base="m", directory="d", job="ftjob-1", created_at=1
                )
            )
        transaction.roll_back("ftjob-1", 5)
    with store.read() as transaction:
        assert [each.id for each in transaction.metrics("ftjob-1")] == [
            "s1",
            "s2",
            "s3",
            "s4",
            "v4",
            "s5",
        ]
        assert [
            each.id for each in transaction.events("a", "ftjob-1", after=None, limit=2).items
        ] == ["words", "v4"]
        assert [each.step for each in transaction.all_checkpoints("ftjob-1")] == [4]
        assert [each.name for each in transaction.adapters("a", "m")] == ["n4"]
        assert transaction.job("a", "ftjob-1").num_steps_done == 5


def test_deaths_are_forgotten_a_hundred_steps_beyond_the_furthest(store, tmp_path):
    writer, suspected = (
        JobReportWriter(store, Folders(tmp_path)),
        {"ftjob-1": Deaths(num=2, step=50)},
    )

    def makes_step(step):
        event = JobEvent(
            job="ftjob-1", kind="step", step=step, now_s=0.0, loss=1.0, token_accuracy=0.5
        )
        writer.write([EngineReported(events=[event])], {"ftjob-1": None}, 0.0)
        with store.read() as transaction:
            return transaction.deaths()

    with store.write() as transaction:
        transaction.add_job(job(num_steps=1000))
        transaction.put_deaths(suspected)
    assert makes_step(149) == suspected
    assert makes_step(150) == {}


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_other(store):
    with store.write() as transaction:
        transaction.add_job(job())
        transaction.put_checkpoint(checkpoint(4))
        put = transaction.put_checkpoint(checkpoint(4, listed=False, id="other"))
        assert (put.id, put.directory, put.listed) == ("ftckpt_4", "other", True)
        transaction.put_checkpoint(checkpoint(6, listed=False))
        assert [
            each.step for each in transaction.checkpoints("a", "ftjob-1", after=None, limit=9).items
        ] == [4]


def test_writers_wait_for_each_other(store):
    with store.write() as transaction:
        transaction.add_job(job())
    errors = []

    def write(number):
        try:
            for n in range(20):
                with store.write() as transaction:
                    done = transaction.any_job("ftjob-1").num_steps_done
                    transaction.change_job("ftjob-1", num_steps_done=done + 1)
                    transaction.add_event(event(f"{number}-{n}"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with store.read() as transaction:
        assert transaction.any_job("ftjob-1").num_steps_done == 80


def test_a_newer_database_is_left_alone(tmp_path):
    Store.at(tmp_path).close()
    with sqlite3.connect(tmp_path / "coserve.db") as connection:
        connection.execute("UPDATE coserve_schema SET version = 99")
    connection.close()
    with pytest.raises(
        StoreError, match="schema 99, which a newer coserve has written; this one knows 1"
    ):
        Store.at(tmp_path)


def test_databases_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("x" * 10_000)
    for url in (
        f"sqlite:///{tmp_path}/none/x.db",
        "nonsense",
        "nothing://x",
        f"sqlite:///{tmp_path}/file",
    ):
        with pytest.raises(StoreError, match="cannot be opened"):
            Store(url)


# -- blobs -----------------------------------------------------------------------------------


def create(files, content=b"abc", **named):
    return files.create(
        "a", **{"purpose": "batch", "filename": "../../x", "source": io.BytesIO(content), **named}
    )


def test_blobs_lie_under_their_ids(store, tmp_path):
    files = Files(store, tmp_path / "files")
    record = create(files, b"x" * 3_000_000)
    assert files.path(record) == tmp_path / "files" / record.id
    assert files.path(record).read_bytes() == b"x" * 3_000_000
    assert files.find("a", record.id) == record
    assert not files.delete("b", record.id)
    assert files.delete("a", record.id)
    assert not files.delete("a", record.id)
    assert list((tmp_path / "files").iterdir()) == []


def test_an_upload_that_breaks_off_leaves_nothing(store, tmp_path):
    files = Files(store, tmp_path / "files", max_bytes=10)
    with pytest.raises(DataError, match="longer than 10 bytes"):
        create(files, b"x" * 11)

    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        create(files, source=Broken())
    assert list((tmp_path / "files").iterdir()) == []
    assert create(files, b"x" * 10).num_bytes == 10


def test_files_have_their_time(store, tmp_path, monkeypatch):
    files = Files(store, tmp_path / "files")
    short, long = create(files, expires_after_s=3600), create(files)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert files.find("a", short.id) is None
    assert files.find("a", long.id) == long
    newer = create(files)  # makes room while the server runs
    assert {path.name for path in (tmp_path / "files").iterdir()} == {long.id, newer.id}
    monkeypatch.setattr(time, "time", lambda: now)
    create(files, expires_after_s=3600)
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    files.tidy()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {long.id, newer.id}


def test_blobs_without_records_are_cleared_away(store, tmp_path):
    files = Files(store, tmp_path / "files")
    record = create(files)
    for name in ("file-none", f"{record.id}.part"):
        (tmp_path / "files" / name).write_text("x")
    files.tidy()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [record.id]


def test_conversations_that_were_used_last_are_kept(store):
    def begin(transaction, id, tenant="a"):
        transaction.add_conversation(
            ConversationRecord(id=id, tenant=tenant, created_at=1, used_at=1)
        )
        return transaction.conversation(tenant, id)

    def items(*ids):
        return [({"id": id, "text": "\0"}, 10) for id in ids]

    with store.write() as transaction:
        for id in ("c0", "c1", "c2"):
            transaction.add_conversation_items(
                begin(transaction, id), items(f"{id}a", f"{id}b"), most_bytes=60
            )
        transaction.add_conversation_items(
            begin(transaction, "other", "b"), items("c0a"), most_bytes=60
        )
        assert transaction.remove_conversation_item("c0", "c0b")
        assert not transaction.remove_conversation_item("c0", "c1a"), "it is in another one"
        assert transaction.conversation("a", "c0").num_bytes == 10
        transaction.add_conversation_items(
            transaction.conversation("a", "c2"), items("c2c", "c2d"), most_bytes=64
        )
    with store.read() as transaction:
        assert [id for id in ("c0", "c1", "c2") if transaction.conversation("a", id)] == [
            "c1",
            "c2",
        ]
        assert [item["id"] for item in transaction.conversation_items("c2")] == [
            "c2a",
            "c2b",
            "c2c",
            "c2d",
        ]
        assert transaction.conversation_items("c0") == []
        assert (
            transaction.conversation("b", "other") and transaction.conversation("b", "c2") is None
        )


def response(id, tenant="a", **fields):
    given = {"created_at": 1, "expires_at": 2**40, "status": "completed", "num_bytes": 10}
    return ResponseRecord(
        **{
            "id": id,
            "tenant": tenant,
            "input": [{"x": "\0"}],
            "response": {"id": id},
            **given,
            **fields,
        }
    )


def test_the_newest_responses_of_a_tenant_are_kept(store):
    for number in range(9):
        with store.write() as transaction:
            transaction.put_response(response(f"r{number}"), most_bytes=40)
            transaction.put_response(response(f"other{number}", "b"), most_bytes=1000)
    with store.write() as transaction:
        transaction.put_response(response("r8", num_bytes=20, status="failed"), most_bytes=40)
        transaction.put_response(response("late", expires_at=1), most_bytes=40)
    with store.read() as transaction:
        assert [n for n in range(9) if transaction.response("a", f"r{n}")] == [8], (
            "the oldest make room, and a little more of it"
        )
        assert all(transaction.response("b", f"other{n}") for n in range(9))
        assert transaction.response("b", "r8") is None
        assert transaction.response("a", "late") is None
        assert transaction.response("a", "r8").input == [{"x": "\0"}]
    with store.write() as transaction:
        assert transaction.remove_response("a", "r8")
        assert not transaction.remove_response("a", "r8")


def test_responses_that_a_process_left_have_failed(store):
    with store.write() as transaction:
        transaction.put_response(response("r1", status="in_progress"), most_bytes=100)
        transaction.put_response(response("r2"), most_bytes=100)
        transaction.put_response(response("r3", expires_at=1), most_bytes=100)
    with store.write() as transaction:
        transaction.end_unfinished_responses(
            transaction.unfinished_responses(), {"code": "server_error"}
        )
    with store.read() as transaction:
        found = transaction.response("a", "r1")
        assert (found.status, found.response) == (
            "failed",
            {"id": "r1", "status": "failed", "error": {"code": "server_error"}},
        )
        assert transaction.response("a", "r2") == response("r2")
