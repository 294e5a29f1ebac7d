"""Jobs on PostgreSQL: the same life as on SQLite, also while the database goes away; and a real
server there."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from job_data import DATA, LONG, QUICK, steps_of
from job_engine import world
from postgres import Postgres, find_programs
from served import is_alive, serving


def test_a_job_outlives_a_database_that_goes_away(tmp_path: Path, postgres: Postgres):
    async def story():
        async with world(tmp_path, database=postgres.new_database()) as w:
            job = await w.create(DATA, **LONG)
            await w.until_step(job.id, 3)
            with postgres.away():
                await asyncio.sleep(0.2)  # whatever it would write meanwhile
            done = w.job(job.id).num_steps_done
            await w.until_step(job.id, done + 3)
            assert (await w.manager.pause(job.tenant, job.id)).status == "paused"
            assert (await w.manager.resume(job.tenant, job.id)).status in ("queued", "running")
            await w.until_step(job.id, w.job(job.id).num_steps_done + 1)
            assert (await w.manager.cancel(job.tenant, job.id)).status == "cancelled"
            steps = steps_of(w.events(job.id))
            assert steps == list(range(1, len(steps) + 1)), "each once"

    asyncio.run(story())


@pytest.mark.skipif(find_programs() is None, reason="PostgreSQL is not installed")
def test_the_database_of_tests_that_are_killed_ends_with_them():
    script = """
import time
from postgres import postgres_server
with postgres_server() as server:
    print(server.directory, flush=True)
    time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as tests:
        assert tests.stdout is not None
        directory = Path(tests.stdout.readline().strip())
        server = int((directory / "data" / "postmaster.pid").read_text().split()[0])
        assert is_alive(server)
        tests.kill()
    until_s = time.monotonic() + 60
    while is_alive(server) or directory.exists():
        assert time.monotonic() < until_s, "it is still there"
        time.sleep(0.02)


def test_a_server_on_postgresql_is_killed_and_resumes(postgres: Postgres, monkeypatch):
    monkeypatch.setenv("COSERVE_DATABASE", postgres.new_database())
    home = Path(mkdtemp(prefix="coserve-home-"))
    lines = [
        json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(9)
    ]
    hyperparameters: Any = {"n_epochs": 10, "batch_size": 3}
    with serving(home=home) as served:
        client = served.client()
        file = client.files.create(
            file=("data.jsonl", "\n".join(lines).encode()), purpose="fine-tune"
        )
        job = client.fine_tuning.jobs.create(
            model="small",
            training_file=file.id,
            hyperparameters=hyperparameters,
            extra_body={"coserve": {**QUICK["extension"], "checkpoint_every_steps": 10}},
        )
        assert not (home / "coserve.db").exists()
        served.wait_until(lambda: list(client.fine_tuning.jobs.checkpoints.list(job.id)))
        served.process.kill()
    with serving(home=home) as served:
        client = served.client()

        def over():
            found = client.fine_tuning.jobs.retrieve(job.id)
            return found if found.status in ("succeeded", "failed") else None

        found = served.wait_until(over, limit_s=120)
        assert found.status == "succeeded", found.error
        events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
        data: list[Any] = [event.data for event in events if event.type == "metrics"]
        metrics = [each["step"] for each in data if "train_loss" in each]
        assert sorted(metrics) == list(range(1, 31)), "each once"
        with postgres.away():
            away = served.get("/v1/files")
            assert away.status_code == 503 and away.headers["retry-after"] == "2"
            assert "connection" not in away.text, "where the database is, is not for clients"
            assert client.completions.create(model="small", prompt="x", max_tokens=1).choices
        assert "the database cannot be used now: " in served.log.read_text()
        answer = client.completions.create(
            model=found.fine_tuned_model, prompt="What is 3? ", max_tokens=2
        )
        assert answer.usage.completion_tokens > 0
    assert "Traceback" not in served.log.read_text()
