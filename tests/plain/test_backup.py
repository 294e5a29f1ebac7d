"""`coserve backup` and `coserve restore`: one moment of a home that changes all the time, and
nothing from outside."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import shutil
import sqlite3
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from homes import TENANT, HandMade
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.errors import CoserveError
from coserve.jobs.maintenance.backup import MANIFEST, write_backup
from coserve.jobs.maintenance.doctor import examine
from coserve.jobs.maintenance.restore import restore_backup
from coserve.jobs.records import AdapterRecord, FileRecord
from coserve.jobs.sql.store import DATABASE_FILE, Store
from coserve.server.lifecycle.home_lock import lock_home


@pytest.fixture
def home(tmp_path, database):
    made = HandMade(tmp_path / "home", None if database.startswith("sqlite") else database)
    yield made
    made.close()


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout.splitlines()[-1])


def restored(archive: Path, home: Path, url: str | None = None) -> Store:
    restore_backup(archive, home, url)
    return Store.at(home, url)


def rows(store: Store) -> dict[str, tuple]:
    with store.read() as transaction:
        files = transaction.all_of(FileRecord)
        page = transaction.jobs(TENANT, after=None, limit=99)
        events = [
            transaction.events(TENANT, job.id, after=None, limit=99).items for job in page.items
        ]
    return {"files": files, "jobs": page.items, "events": tuple(events)}


def test_what_is_restored_is_what_was_there(home, tmp_path):
    running, over = home.job(metadata={"k": "ü"}), home.job()
    for step in (2, 4):
        home.checkpoint(running, step)
        home.checkpoint(over, step)
    further = home.job(
        start={"name": "n", "directory": str(home.folder(over) / "checkpoints" / "step-2")}
    )
    home.writer.end(over.id, "cancelled")
    content = home.upload(b"\x00\xff" * 100_000)
    (home.path / "files" / "file-none").write_bytes(b"no record")
    with home.store.write() as transaction:
        transaction.put_loaded_adapter(
            AdapterRecord(
                tenant=TENANT, name="elsewhere", base="m", directory="/srv/adapter", created_at=1
            )
        )
    before = rows(home.store)
    archive, place = tmp_path / "home.tar", tmp_path / "new"
    made = write_backup(home.path, home.store, archive)
    assert (made.num_files, made.num_jobs, made.num_checkpoints, made.missing) == (4, 3, 4, ())
    assert archive.stat().st_mode & 0o777 == 0o600
    assert not (home.path / ".backup").exists()
    store = restored(archive, place)
    after = rows(store)
    assert (after["files"], after["events"]) == (before["files"], before["events"])
    assert [job.id for job in after["jobs"]] == [job.id for job in before["jobs"]]
    with store.read() as transaction:
        assert transaction.any_job(further.id).start["directory"] == str(
            place / "jobs" / over.id / "checkpoints/step-2"
        )
        (loaded,) = transaction.all_loaded_adapters()
        assert loaded.directory == "/srv/adapter"
        for each in transaction.all_checkpoints(running.id):
            assert Path(each.directory).is_relative_to(place)
    assert (place / "files" / content.id).read_bytes() == b"\x00\xff" * 100_000
    for path in ("examples.msgpack", "checkpoints/step-4/optimizer.safetensors"):
        assert (place / "jobs" / running.id / path).read_bytes() == (
            home.folder(running) / path
        ).read_bytes()
    assert not (
        place / "jobs" / running.id / "checkpoints" / "step-2" / "optimizer.safetensors"
    ).exists()
    assert not (place / "files" / "file-none").exists()
    assert [finding.about for finding in examine(place, store)] == [
        f"elsewhere of {TENANT}, loaded"
    ]
    store.close()


def test_from_sqlite_to_postgresql(tmp_path, postgres):
    home = HandMade(tmp_path / "home")
    job = home.job()
    home.checkpoint(job, 3)
    archive, url = tmp_path / "home.tar", postgres.new_database()
    write_backup(home.path, home.store, archive)
    store = restored(archive, tmp_path / "new", url)
    assert rows(store) == rows(home.store)
    with store.write() as transaction:  # numbers of rows continue
        transaction.add_file(
            FileRecord(id="f", tenant="a", purpose="p", filename="f", num_bytes=1, created_at=1)
        )
        assert (
            transaction.files("a", purpose=None, after=None, limit=1, newest_first=True).items[0].id
            == "f"
        )
    store.close()
    assert not (tmp_path / "new" / "coserve.db").exists()
    with pytest.raises(CoserveError, match="another home"):
        restore_backup(archive, tmp_path / "third", url)
    home.close()


@contextmanager
def going_on(*changes: Callable[[], None]):
    """Threads that make changes again and again; each has made one before this begins."""
    stop, raised, begun = threading.Event(), [], threading.Barrier(len(changes) + 1)

    def repeat(change: Callable[[], None]) -> None:
        try:
            change()
            begun.wait()
            while not stop.wait(
                0.002
            ):  # SQLite's writers take no turns: the backup's would wait for long
                change()
        except BaseException as error:
            raised.append(error)
            begun.abort()

    threads = [threading.Thread(target=repeat, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    try:
        begun.wait()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert raised == []


def test_backups_of_a_home_that_changes_all_the_time(tmp_path):
    home = HandMade(tmp_path / "home")
    kept = [home.upload(b"kept" * 1000) for _ in range(3)]
    jobs = [home.job(num_steps=10**6) for _ in range(2)]
    steps = {job.id: 0 for job in jobs}
    for job in jobs:
        home.checkpoint(job, 0, listed=False)

    def files_come_and_go() -> None:
        record = home.upload(b"x" * 5000)
        home.files.delete(TENANT, record.id)

    def checkpoints_come_and_go() -> None:
        for job in jobs:
            steps[job.id] += 1
            old = home.folder(job) / "checkpoints" / f"step-{steps[job.id] - 1}"
            home.checkpoint(job, steps[job.id], listed=False)
            with home.store.write() as transaction:
                transaction.remove_checkpoint(job.id, steps[job.id] - 1)
            shutil.rmtree(old)

    def jobs_come_and_go() -> None:
        job = home.job()
        home.checkpoint(job, 1)
        home.writer.end(job.id, "cancelled")

    with going_on(files_come_and_go, checkpoints_come_and_go, jobs_come_and_go):
        for number in range(4):
            made = write_backup(home.path, home.store, tmp_path / f"{number}.tar")
            assert made.missing == ()
    for number in range(4):
        place = tmp_path / f"place{number}"
        store = restored(tmp_path / f"{number}.tar", place)
        assert examine(place, store) == [], (
            "all that is on record is there, whole, and nothing else"
        )
        assert all((place / "files" / record.id).read_bytes() == b"kept" * 1000 for record in kept)
        store.close()
    home.close()


@pytest.mark.parametrize(
    "command",
    [["backup", "{out}"], ["export", "last", "{out}"], ["jobs", "cancel", "last", "--offline"]],
)
def test_a_database_that_no_server_has_used_is_refused_and_not_made(command, tmp_path):
    HandMade(tmp_path / "home", None).close()
    before, out = sorted(tmp_path.rglob("*")), tmp_path / "out"
    where = ("--home", str(tmp_path / "home"), "--database", f"sqlite:///{tmp_path}/mistyped.db")
    with pytest.raises(
        CoserveError, match=r"mistyped\.db has no records: no server has used it; set --database"
    ):
        run(*(each.format(out=out) for each in command), *where)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_missing_from_the_home_is_told(home, tmp_path):
    file, job = home.upload(), home.job()
    home.checkpoint(job, 1)
    home.files.path(file).unlink()
    (home.folder(job) / "checkpoints" / "step-1" / "optimizer.safetensors").unlink()
    made = write_backup(home.path, home.store, tmp_path / "home.tar")
    assert made.missing == (
        f"files/{file.id}",
        f"jobs/{job.id}/checkpoints/step-1/optimizer.safetensors",
    )
    assert restore_backup(tmp_path / "home.tar", tmp_path / "new").missing == made.missing


def test_archives_that_are_refused(tmp_path):
    home = HandMade(tmp_path / "home")
    file = home.upload(b"content " * 100)
    home.close()
    archive = tmp_path / "good.tar"
    assert run("backup", str(archive), "--home", str(home.path))["num_files"] == 1
    content = archive.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(CoserveError, match=words):
            run("restore", str(tmp_path / "bad.tar"), "--home", str(tmp_path / "new"))
        assert [path.name for path in (tmp_path / "new").glob("*")] in ([], ["lock"])

    def rewritten(change: Callable[[dict[str, bytes]], None], *more: tarfile.TarInfo) -> None:
        with tarfile.open(archive) as old:
            members = {name: old.extractfile(name).read() for name in old.getnames()}
        change(members)
        with tarfile.open(tmp_path / "bad.tar", "w") as new:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))
            for member in more:
                new.addfile(member)

    (tmp_path / "bad.tar").write_bytes(content.replace(b"content content", b"content contxxx"))
    refused(f"files/{file.id} is not what was saved")
    (tmp_path / "bad.tar").write_bytes(content[: len(content) // 2])
    refused("cannot be restored|cut short")
    for nothing in (b"no archive", b""):
        (tmp_path / "bad.tar").write_bytes(nothing)
        refused("cannot be restored: it is not a tar archive$")
    for name in ("../outside", "/tmp/outside", "files/more"):
        rewritten(partial(dict.update, **{name: b"x"}))
        refused("its files are not those of its manifest.json")
    link = tarfile.TarInfo(f"files/{file.id}x")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    rewritten(lambda members: None, link)
    refused("its files are not those of its manifest.json")

    def escape(members: dict[str, bytes]) -> None:
        members["../outside"] = members.pop(f"files/{file.id}")
        members[MANIFEST] = members[MANIFEST].replace(f"files/{file.id}".encode(), b"../outside")

    rewritten(escape)
    refused("outside")
    assert not (tmp_path / "outside").exists()
    rewritten(
        lambda members: members.update(
            {MANIFEST: members[MANIFEST].replace(b'"format": 1', b'"format": 2')}
        )
    )
    refused("a newer coserve")
    rewritten(lambda members: members.update({MANIFEST: b"[]"}))
    refused("its manifest.json cannot be decoded")
    assert run("restore", str(archive), "--home", str(tmp_path / "new"))["num_files"] == 1
    with pytest.raises(CoserveError, match="is not empty"):
        run("restore", str(archive), "--home", str(tmp_path / "new"))
    with pytest.raises(CoserveError, match="there is no file"):
        run("restore", str(tmp_path / "none.tar"), "--home", str(tmp_path / "new2"))


def changed_backup(tmp_path: Path, *statements: str) -> Path:
    """A backup whose database somebody else has changed."""
    home = HandMade(tmp_path / "home")
    running = home.job()
    home.checkpoint(running, 2)
    with home.store.write() as transaction:
        transaction.put_loaded_adapter(
            AdapterRecord(
                tenant=TENANT, name="elsewhere", base="m", directory="/srv/adapter", created_at=1
            )
        )
    archive, stage = tmp_path / "good.tar", tmp_path / "stage"
    write_backup(home.path, home.store, archive)
    home.close()
    with tarfile.open(archive) as old:
        old.extractall(stage, filter="data")
    database = stage / DATABASE_FILE
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        for statement in statements:
            connection.execute(statement)
    manifest = json.loads((stage / MANIFEST).read_text())
    manifest["contents"][DATABASE_FILE]["sha256"] = hashlib.sha256(
        database.read_bytes()
    ).hexdigest()
    (stage / MANIFEST).write_text(json.dumps(manifest))
    with tarfile.open(tmp_path / "bad.tar", "w") as new:
        for name in [*manifest["contents"], MANIFEST]:
            new.add(stage / name, name)
    return tmp_path / "bad.tar"


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "UPDATE checkpoints SET directory = '/home/somebody/precious'",
            "not below jobs/ in the home",
        ),
        (
            "UPDATE checkpoints SET directory = 'jobs/../../precious/x'",
            "not below jobs/ in the home",
        ),
        ("UPDATE checkpoints SET directory = '..'", "not below jobs/ in the home"),
        ("UPDATE checkpoints SET directory = ''", "not below jobs/ in the home"),
        ("UPDATE loaded_adapters SET directory = '../elsewhere'", "not below jobs/ in the home"),
        ("UPDATE loaded_adapters SET job = 'x'", "not below jobs/ in the home"),
        ("UPDATE jobs SET id = '../../precious'", "as its id, which is not a name"),
        ("UPDATE jobs SET id = '..'", "as its id, which is not a name"),
        ("UPDATE jobs SET id = '/precious'", "as its id, which is not a name"),
        (
            "UPDATE jobs SET training_file = '../../precious'",
            "as its training_file, which is not a name",
        ),
        ("UPDATE files SET id = 'a/b'", "as its id, which is not a name"),
        (
            'UPDATE jobs SET start = \'{"name": "n", "directory": "../x"}\'',
            "not below jobs/ in the home",
        ),
        ("UPDATE jobs SET start = '{}'", "which is not an adapter"),
        ("CREATE VIEW looks AS SELECT * FROM jobs", "'looks', which is not a plain table"),
        (
            "CREATE TRIGGER acts AFTER INSERT ON jobs BEGIN DELETE FROM files; END",
            "'acts', which is not a plain table",
        ),
    ],
)
def test_a_database_of_others_leads_nowhere_out_of_the_home(tmp_path, statement, words):
    archive = changed_backup(tmp_path, statement)
    with pytest.raises(CoserveError, match=words):
        run("restore", str(archive), "--home", str(tmp_path / "new"))
    assert not (tmp_path / "new" / "jobs").exists()


def test_a_database_that_nobody_changed_is_restored(tmp_path):
    made = run("restore", str(changed_backup(tmp_path)), "--home", str(tmp_path / "new"))
    assert made["num_jobs"] == 1


def test_archives_that_grow_are_refused(tmp_path):
    archive, bad = changed_backup(tmp_path), tmp_path / "grows.tar"
    for open_with in (gzip.open, bz2.open, lzma.open):
        with open_with(bad, "wb") as file:
            file.write(archive.read_bytes())
        with pytest.raises(CoserveError, match="it is not a tar archive"):
            run("restore", str(bad), "--home", str(tmp_path / "new"))
    with tarfile.open(archive) as old:
        manifest = json.loads(old.extractfile(MANIFEST).read())
    changes: list[dict[str, object]] = [
        {"contents": []},
        {"missing": 7},
        {"missing": [1]},
        {"format": "1"},
    ]
    for change in changes:
        rewritten = json.dumps({**manifest, **change}).encode()
        with tarfile.open(bad, "w") as new:
            member = tarfile.TarInfo(MANIFEST)
            member.size = len(rewritten)
            new.addfile(member, io.BytesIO(rewritten))
        with pytest.raises(CoserveError, match=r"its manifest\.json cannot be decoded"):
            run("restore", str(bad), "--home", str(tmp_path / "new"))


def test_archives_are_written_whole_or_not_at_all(tmp_path):
    home = HandMade(tmp_path / "home")
    home.upload()
    with pytest.raises(CoserveError, match="cannot be written: No such file"):
        write_backup(home.path, home.store, tmp_path / "none" / "x.tar")
    archive = tmp_path / "x.tar"
    (home.path / ".backup" / "files").mkdir(parents=True)  # of one that was killed
    with lock_home(home.path):  # as a server has it
        write_backup(home.path, home.store, archive)
    with pytest.raises(CoserveError, match="exists already"):
        write_backup(home.path, home.store, archive)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("x")) == [
        "x.tar"
    ]
    assert not (home.path / ".backup").exists()
    home.close()
