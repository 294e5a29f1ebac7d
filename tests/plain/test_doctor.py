"""`coserve doctor`: each thing that may be wrong is found and named, and what loses nothing is
mended."""

import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from homes import TENANT, HandMade
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.errors import CoserveError
from coserve.jobs.maintenance.doctor import examine
from coserve.jobs.records import AdapterRecord, FileRecord
from coserve.server.lifecycle.home_lock import lock_home


@pytest.fixture
def home(tmp_path):
    made = HandMade(tmp_path / "home")
    yield made
    made.close()


def problems(home: HandMade) -> dict[str, str]:
    """Return the problems of a home by what they concern."""
    return {finding.about: finding.problem for finding in examine(home.path, home.store)}


def run(*arguments: str) -> tuple[int, dict, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if isinstance(result.exception, CoserveError):
        raise result.exception
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]), result.stdout


def test_nothing_is_wrong_with_a_home_in_use(home):
    running, done = home.job(), home.job(status="succeeded", finished_at=5)
    for step in (2, 4):
        home.checkpoint(running, step)
    home.checkpoint(done, 10)
    home.writer.sweep(done.id)
    home.upload()
    assert problems(home) == {}
    home.close()
    status, last, shown = run("--home", str(home.path))
    assert (status, last) == (0, {"home": str(home.path), "findings": [], "left": 0})
    assert "nothing is wrong" in shown


def test_what_kills_leave_of_batches_and_of_files_that_jobs_read(home):
    job = home.job()
    part = home.folder(job) / "validation.msgpack.part"
    part.write_bytes(b"half")
    (home.path / "batches" / "batch_none").mkdir(parents=True)
    assert problems(home) == {
        "batches/batch_none": "results of no batch that is under way",
        str(part.relative_to(home.path)): "a file that broke off",
    }
    home.writer.tidy()
    assert not part.exists()


def test_files(home):
    gone, short = home.upload(), home.upload(b"x" * 100)
    home.files.path(gone).unlink()
    home.files.path(short).write_bytes(b"x")
    (home.path / "files" / "file-none").write_bytes(b"whose?")
    (home.path / "files" / "file-x.part").write_bytes(b"half")
    assert problems(home) == {
        f"{gone.id} ('data.jsonl' of {TENANT})": "its content is not there",
        f"{short.id} ('data.jsonl' of {TENANT})": "has 1 bytes; 100 were uploaded",
        "files/file-none": "no file on record",
        "files/file-x.part": "an upload that broke off",
    }


def test_checkpoints(home):
    job = home.job()
    directories = [home.checkpoint(job, step) for step in (1, 2, 3, 4)]
    for name in os.listdir(directories[0]):
        (directories[0] / name).unlink()
    directories[0].rmdir()
    weights = directories[1] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (directories[2] / "adapter_config.json").write_text("{")
    (directories[3] / "optimizer.safetensors").unlink()
    (home.folder(job) / "checkpoints" / "step-9").mkdir()
    (home.folder(job) / "checkpoints" / ".part-abc").mkdir()
    (home.path / "jobs" / "ftjob-none").mkdir()
    found = problems(home)
    where = f"jobs/{job.id}/checkpoints"
    for step, words in (
        (1, "is not there"),
        (2, "cannot be read"),
        (3, "cannot be read"),
        (4, "has no optimizer"),
    ):
        assert words in found.pop(f"{job.name}:ckpt-step-{step} of {TENANT}")
    assert found == {
        f"{where}/step-9": "no checkpoint on record",
        f"{where}/.part-abc": "a checkpoint that broke off",
        "jobs/ftjob-none": "no job on record",
    }


def test_models_that_full_fine_tuning_has_made(home):
    """No adapters, but models in Hugging Face's layout."""
    job = home.job()
    directories = [home.checkpoint(job, step) for step in (1, 2, 3, 4)]
    for directory in directories:
        (directory / "adapter_model.safetensors").rename(directory / "model.safetensors")
        (directory / "adapter_config.json").rename(directory / "config.json")
        (directory / "coserve_full.json").write_text("{}")
    assert problems(home) == {}
    weights = directories[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (directories[1] / "model.safetensors").unlink()
    (directories[2] / "config.json").unlink()
    (directories[3] / "job.json").unlink()
    words = (
        "model.safetensors cannot be read",
        "has no model.safetensors",
        "has no config.json",
        "has no job.json",
    )
    for step, (about, problem) in enumerate(problems(home).items(), 1):
        assert about == f"{job.name}:ckpt-step-{step} of {TENANT}"
        assert words[step - 1] in problem


def test_jobs_and_adapters(home):
    lost, over, early = (
        home.job(),
        home.job(status="failed", finished_at=None),
        home.job(num_steps=0),
    )
    (home.folder(lost) / "examples.msgpack").unlink()
    far = home.job(num_steps_done=11)
    start = {"name": "n", "directory": "/not/there"}
    further = home.job(start=start)
    odd = home.job(status="dreaming")
    unswept = home.job()
    with home.store.write() as transaction:
        transaction.change_job(unswept.id, status="cancelled", finished_at=1)
        adapter = AdapterRecord(
            tenant=TENANT, name="mine", base="m", directory="/gone", created_at=1
        )
        transaction.put_loaded_adapter(adapter)
    found = problems(home)
    for job, words in (
        (lost, "its examples (examples.msgpack) are not there"),
        (over, "is failed without a time"),
        (early, "its files have not been read"),
        (far, "11 of 10 steps"),
        (further, "is not at /not/there"),
        (odd, "cannot be 'dreaming'"),
        (unswept, "what only a running job needs is there"),
    ):
        assert words in found.pop(f"{job.id} of {TENANT}"), job
    assert found == {f"mine of {TENANT}, loaded": "/gone: is not there"}


def test_repair_mends_what_loses_nothing_and_says_so(home):
    job, gone = home.job(), home.upload()
    home.checkpoint(job, 1)
    home.files.path(gone).unlink()
    (home.path / "files" / "file-none").write_bytes(b"whose?")
    (home.folder(job) / "checkpoints" / "step-9").mkdir()
    (home.path / "run" / "x").mkdir(parents=True)
    (home.path / ".backup").mkdir()
    (home.path / "notes").write_text("x")
    home.close()
    home.path.chmod(0o755)
    (home.path / "notes").chmod(0o644)
    status, before, _ = run("--home", str(home.path))
    assert (status, before["left"]) == (1, 7)
    assert home.path.stat().st_mode & 0o777 == 0o755, "a question changes nothing"
    assert run("--home", str(home.path))[1] == before
    status, after, shown = run("--home", str(home.path), "--repair")
    assert (status, after["left"]) == (1, 1)
    assert "is moved to lost+found" in shown
    assert (home.path / "lost+found" / "files" / "file-none").read_bytes() == b"whose?"
    assert (home.path.stat().st_mode & 0o777, (home.path / "notes").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    status, last, _ = run("--home", str(home.path), "--repair")
    assert status == 1
    assert [finding["problem"] for finding in last["findings"]] == ["its content is not there"]
    assert last["findings"][0]["repairable"] is False


def test_a_database_whose_tables_are_not_as_they_should_be(home):
    home.job()
    home.close()
    path = home.path / "coserve.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        connection.execute("DELETE FROM jobs")
        connection.execute(
            "INSERT INTO events (id, tenant, job, created_at, level, message, kind, data) "
            "VALUES ('e', 'a', 'ftjob-none', 1, 'info', 'm', '', '{}')"
        )
        connection.execute("ALTER TABLE jobs DROP COLUMN suffix")
    connection.close()
    status, last, _ = run("--home", str(home.path), "--repair")
    assert status == 1
    assert [finding["problem"] for finding in last["findings"]] == [
        "row 1 of events belongs to something in jobs that is not there",
        "the table jobs lacks suffix",
    ]


def test_a_database_that_is_damaged(home):
    with home.store.write() as transaction:
        for n in range(300):
            given: dict[str, Any] = {"tenant": "a", "purpose": "p", "num_bytes": 1, "created_at": 1}
            transaction.add_file(FileRecord(id=f"file-{n}", filename="somewhere", **given))
    home.close()
    path = home.path / "coserve.db"
    content = bytearray(path.read_bytes())
    page = content.rindex(b"somewhere") // 4096 * 4096
    content[page : page + 100] = b"\xff" * 100
    path.write_bytes(content)
    status, last, _ = run("--home", str(home.path))
    assert status == 1
    assert re.search("damaged|malformed", last["findings"][0]["problem"])
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(CoserveError, match=r"cannot be opened: .*not a database"):
        run("--home", str(home.path))


def test_not_beside_a_server_nor_where_there_is_none(home, tmp_path: Path):
    with lock_home(home.path), pytest.raises(CoserveError, match=r"a server uses .*: end it"):
        run("--home", str(home.path))
    with pytest.raises(CoserveError, match="there is no home at"):
        run("--home", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoserveError, match=r"has no coserve\.db"):
        run("--home", str(tmp_path / "empty"))
    assert not list((tmp_path / "empty").iterdir())


def test_on_postgresql(postgres, tmp_path, monkeypatch):
    url = postgres.new_database()
    home = HandMade(tmp_path / "home", url)
    gone = home.upload()
    home.files.path(gone).unlink()
    home.close()
    assert run("--home", str(home.path), "--database", url)[1]["left"] == 1
    monkeypatch.setenv("COSERVE_DATABASE", url)
    assert run("--home", str(home.path))[1]["left"] == 1
