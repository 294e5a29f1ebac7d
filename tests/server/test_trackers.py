"""Outputs of a job beside its model: TensorBoard's files, a run of Weights & Biases, its results,
its adapter.
"""

import base64
import copy
import csv
import errno
import io
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from peft import PeftModel
from served import Served, model, serving
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter

from coserve.client.http import Client
from coserve.jobs.metrics.trackers import TensorboardTracker

ROOT = str(Path(__file__).parents[2])
LINES = [{"prompt": f"What is {n}? ", "completion": f"It is {n}."} for n in range(12)]
DATA = "".join(json.dumps(line) + "\n" for line in LINES).encode()
ADAPTER = {"type": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
QUICK = {"adapter": ADAPTER, "optimizer": {"learning_rate": 1e-2}, "checkpoint_every_steps": 4}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        with serving() as running:
            yield running


@pytest.fixture(scope="module")
def job(served: Served) -> Any:
    settings = {"project": "pirates", "name": "first", "tags": ["a", "b"]}
    client: Any = served.client()
    made = client.fine_tuning.jobs.create(
        model="small",
        training_file=client.files.create(file=("data.jsonl", DATA), purpose="fine-tune").id,
        hyperparameters={"n_epochs": 2, "batch_size": 3},
        integrations=[{"type": "wandb", "wandb": settings}],
        extra_body={"coserve": QUICK},
    )
    assert made.integrations[0].wandb.project == "pirates"

    def over() -> Any:
        found = client.fine_tuning.jobs.retrieve(made.id)
        return found if found.status in ("succeeded", "failed", "cancelled") else None

    done = served.wait_until(over, limit_s=120)
    assert done.status == "succeeded"
    return done


def scalars(path: Path) -> dict[str, dict[int, float]]:
    """Read the scalars of an event file: records with their lengths and check sums."""
    found: dict[str, dict[int, float]] = {}
    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
        place += length + 16
    return found


def test_tensorboard_has_the_losses_of_every_step(served: Served, job: Any):
    [path] = served.wait_until(
        lambda: list((served.home / "jobs" / job.id / "tensorboard").iterdir())
    )
    content = csv.DictReader(io.StringIO(served.client().files.content(job.result_files[0]).text))
    right = {int(row["step"]): float(row["train_loss"]) for row in content}
    served.wait_until(lambda: scalars(path).get("train/loss", {}).keys() == right.keys())
    assert scalars(path)["train/loss"] == pytest.approx(right, rel=1e-5)
    assert {"train/learning_rate", "train/gradient_norm", "train/mean_token_accuracy"} <= scalars(
        path
    ).keys()


def test_weights_and_biases_has_a_run(served: Served, job: Any):
    def run() -> bytes:
        found = list(
            (served.home / "jobs" / job.id / "wandb").glob(f"offline-run-*/run-{job.id}.wandb")
        )
        return found[0].read_bytes() if found else b""

    served.wait_until(lambda: all(word in run() for word in (b"pirates", b"first", b"train/loss")))


def test_results_are_encoded_as_openai_does_where_that_is_asked_for(served: Served, job: Any):
    files = served.client().files
    plain = files.content(job.result_files[0]).content
    coded = files.content(job.result_files[0], extra_query={"encoding": "base64"}).content
    assert base64.b64decode(coded) == plain
    assert plain.startswith(b"step,train_loss,")
    wrong = served.get(f"/v1/files/{job.result_files[0]}/content?encoding=gzip")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "encoding")


def test_a_job_says_that_the_server_has_no_key_for_weights_and_biases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The job trains all the same."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    with serving() as served:
        client: Any = served.client()
        made = client.fine_tuning.jobs.create(
            model="small",
            training_file=client.files.create(file=("data.jsonl", DATA), purpose="fine-tune").id,
            hyperparameters={"n_epochs": 1, "batch_size": 3},
            integrations=[{"type": "wandb", "wandb": {"project": "pirates"}}],
            extra_body={"coserve": QUICK},
        )

        def warnings() -> list[str]:
            events = client.fine_tuning.jobs.list_events(made.id, limit=100).data
            return [event.message for event in events if event.level == "warn"]

        [warning] = served.wait_until(warnings, limit_s=60)
        assert "cannot be followed at Weights & Biases: the server has no key" in warning
        assert "WANDB_API_KEY" in warning
        served.wait_until(
            lambda: client.fine_tuning.jobs.retrieve(made.id).status == "succeeded", limit_s=60
        )
        assert len(warnings()) == 1


def command(served: Served, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "COSERVE_URL": served.url, "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-m", "coserve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_jobs_are_listed_with_steps_and_loss(served: Served, job: Any):
    with Client(served.url) as client:
        known = client.get(f"/v1/fine_tuning/jobs/{job.id}")["coserve"]
    assert known["step"] == known["total_steps"] == 8
    status, out, err = command(served, "jobs")
    assert (status, err) == (0, "")
    [line] = [line for line in out.splitlines() if job.id in line]
    assert "8/8" in line and f"{known['train_loss']:.3f}" in line


def test_an_adapter_comes_in_pefts_format(served: Served, job: Any, tmp_path: Path):
    path = f"/v1/fine_tuning/jobs/{job.id}/adapter"
    files = served.get(path).json()["data"]
    for file in files:
        content = served.get(f"{path}/{file['name']}").content
        assert len(content) == file["bytes"]
        (tmp_path / file["name"]).write_bytes(content)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file["name"] for file in files}
    assert not [file for file in files if "optimizer" in file["name"]]
    assert PeftModel.from_pretrained(copy.deepcopy(model()), tmp_path).peft_config["default"].r == 4
    earlier = served.get(f"{path}/adapter_model.safetensors?step=4").content
    assert earlier != (tmp_path / "adapter_model.safetensors").read_bytes()
    for wrong in (
        f"{path}?step=3",
        f"{path}/..%2Fx",
        f"{path}/x",
        "/v1/fine_tuning/jobs/ftjob-none/adapter",
    ):
        assert served.get(wrong).status_code == 404


def test_a_full_disk_holds_nobody_up_and_later_steps_are_written(
    tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """Steps 2 to 40 find no room; the next ones do, in a file of their own."""
    room, write_record = [True], RecordWriter.write

    def write_if_room(file: Any, data: bytes) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_record(file, data)

    monkeypatch.setattr(RecordWriter, "write", write_if_room)

    def write() -> None:
        tracker = TensorboardTracker(tmp_path / "tensorboard", first_step=1)
        for step in range(1, 43):
            room[0] = step == 1 or step > 40
            tracker.add(step, {"train/loss": 1.0 * step})
        tracker.close("succeeded")

    writing = Thread(target=write, daemon=True)
    writing.start()
    writing.join(30)
    assert not writing.is_alive(), "it waits for ever"
    files = [scalars(path)["train/loss"] for path in (tmp_path / "tensorboard").iterdir()]
    assert sorted(files, key=min) == [{1: 1.0}, {41: 41.0, 42: 42.0}]
    assert [record.levelname for record in caplog.records] == [
        "WARNING"
    ] and "No space left" in caplog.text


def test_a_service_that_does_not_answer_keeps_no_server_from_ending(monkeypatch: Any):
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as silent:  # connections are taken by the system, and nobody reads
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        with serving() as server:
            client: Any = server.client()
            job = client.fine_tuning.jobs.create(
                model="small",
                training_file=client.files.create(
                    file=("data.jsonl", DATA), purpose="fine-tune"
                ).id,
                integrations=[{"type": "wandb", "wandb": {"project": "pirates"}}],
                extra_body={"coserve": QUICK},
            )
            server.wait_until(
                lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
            )
            assert server.stop() == 0, "within a minute"
            assert "metrics of jobs were not all written" in server.log.read_text()
