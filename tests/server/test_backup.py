"""A server is backed up while jobs run and files come and go; from the backup, another one resumes
them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from openai import OpenAI
from served import Served, serving
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.jobs.maintenance.doctor import examine
from coserve.jobs.sql.store import Store

LINES = [
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(360)
]
# 6,000 steps, which no machine takes in the test's time; the first are compared.
NUM_EPOCHS, NUM_COMPARED = 50, 60


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exception is not None:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@contextmanager
def uploading(client: OpenAI, contents: dict[str, bytes]) -> Iterator[None]:
    """Files come all the time, and every second one goes again; those that stay are noted once
    acknowledged."""
    stop, raised = threading.Event(), []

    def upload() -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                content = bytes([number % 256]) * 20_000
                file = client.files.create(file=(f"{number}.bin", content), purpose="user_data")
                if number % 2:
                    client.files.delete(file.id)
                else:
                    contents[file.id] = content
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert raised == []


@pytest.mark.long
def test_a_server_from_a_backup_resumes_where_the_other_one_was(tmp_path: Path):
    archive, contents = tmp_path / "home.tar", dict[str, bytes]()
    with serving() as served:
        client = served.client()
        file = client.files.create(
            file=("data.jsonl", "\n".join(LINES).encode()), purpose="fine-tune"
        )
        contents[file.id] = "\n".join(LINES).encode()
        given: Any = {
            "model": "small",
            "training_file": file.id,
            "hyperparameters": {"n_epochs": NUM_EPOCHS, "batch_size": 3},
            "seed": 5,
        }
        settings = {"adapter": {"r": 4, "target_modules": ["q_proj"]}, "checkpoint_every_steps": 5}
        jobs = [
            client.fine_tuning.jobs.create(**given, extra_body={"coserve": settings})
            for _ in range(2)
        ]

        def has_checkpoint(job: Any) -> bool:
            return bool(client.fine_tuning.jobs.checkpoints.list(job.id).data)

        with uploading(client, contents):
            served.wait_until(lambda: all(map(has_checkpoint, jobs)))
            before = dict(contents)
            made = run("backup", str(archive), "--home", str(served.home))
        assert made["missing"] == []
        assert made["num_jobs"] == 2
        assert made["num_files"] >= len(before)
        losses = _losses(served, client, jobs)
    home = Path(mkdtemp(prefix="coserve-home-"))
    restored = run("restore", str(archive), "--home", str(home))
    assert restored["num_files"] == made["num_files"]
    store = Store.at(home)
    assert examine(home, store) == []
    with store.read() as transaction:
        steps = {job.id: job.num_steps_done for job in transaction.unfinished_jobs()}
    store.close()
    assert steps.keys() == {job.id for job in jobs}
    with serving(home=home) as served:
        client = served.client()
        for id, content in before.items():
            assert client.files.content(id).read() == content
        assert _losses(served, client, jobs) == pytest.approx(losses, rel=1e-4)
        for job in jobs:
            words = [
                event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=100)
            ]
            assert any("resumes from step" in word for word in words)


def _losses(served: Served, client: OpenAI, jobs: list[Any]) -> list[float]:
    """Of the first steps of both, each of which is taken once."""
    found = []
    for job in jobs:

        def losses(id: str = job.id) -> list[tuple[int, float]]:
            data: list[Any] = [
                event.data for event in client.fine_tuning.jobs.list_events(id, limit=100)
            ]
            steps = [
                (each["step"], each["train_loss"]) for each in data if each and "train_loss" in each
            ]
            return sorted(steps)

        served.wait_until(lambda of=losses: len(of()) >= NUM_COMPARED, limit_s=240)
        steps = losses()[:NUM_COMPARED]
        assert [number for number, _ in steps] == list(range(1, NUM_COMPARED + 1))
        found += [loss for _, loss in steps]
    return found
