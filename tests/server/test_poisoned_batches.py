"""Lines of batches that processes die of, on real servers: set aside, while everything beside them
comes to its end."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from batches import COMPLETIONS, begin, completion, results, wait_for
from served import Served, keys_file, serving

from coserve.jobs.records import BATCH_OVER

pytestmark = pytest.mark.long

# Run by the server's process as it starts. The engine's process ends as it begins a step for a
# prompt of 77 tokens; the server's is killed as it reads a request that says so, as by a fault in a
# native library.
DEADLY_FOR_ENGINES = """
import os
from coserve.engine.request_lifecycle import RequestLifecycle

add = RequestLifecycle.add

def deadly(self, name, prompt, *arguments, **more):
    if len(prompt) == 77:
        os._exit(3)
    return add(self, name, prompt, *arguments, **more)

RequestLifecycle.add = deadly
"""
DEADLY_FOR_SERVERS = """
import os, signal
from coserve.server.batches import answers as batch_answers

completion_request = batch_answers.completion_request

async def deadly(body, *arguments):
    if body.prompt == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    return await completion_request(body, *arguments)

batch_answers.completion_request = deadly
"""


def job_of(client: Any) -> str:
    """A fine-tuning job that trains as long as batches run."""
    lines = [
        json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(30)
    ]
    file = client.files.create(file=("data.jsonl", "\n".join(lines).encode()), purpose="fine-tune")
    method = {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 8, "batch_size": 3}},
    }
    made = client.fine_tuning.jobs.create(model="small", training_file=file.id, method=method)
    return str(made.id)


def test_a_line_that_kills_engines_fails_alone_beside_other_tenants_and_a_job(tmp_path: Path):
    keys = keys_file(tmp_path, "", mallory="key-of-mallory", ann="key-of-ann", bob="key-of-bob")
    with serving("--api-keys-file", str(keys), before=DEADLY_FOR_ENGINES) as served:
        mallory, ann, bob = (served.client(f"key-of-{name}") for name in ("mallory", "ann", "bob"))
        job = job_of(ann)
        innocent = {
            client: begin(
                client, [completion(f"{n}", max_tokens=30) for n in range(60)], endpoint=COMPLETIONS
            )
            for client in (ann, bob)
        }
        lines = [completion("good"), completion("bad", [1] * 77), completion("better")]
        bad = wait_for(mallory, begin(mallory, lines, endpoint=COMPLETIONS), 240)
        assert (bad.status, sorted(results(mallory, bad.output_file_id))) == (
            "completed",
            ["better", "good"],
        )
        assert results(mallory, bad.error_file_id)["bad"]["error"]["code"] == "engine_died"
        for client, batch in innocent.items():
            done = wait_for(client, batch, 240)
            counts = done.request_counts
            assert (done.status, counts.completed, counts.failed) == ("completed", 60, 0)
        served.wait_until(
            lambda: ann.fine_tuning.jobs.retrieve(job).status in ("succeeded", "failed"),
            limit_s=240,
        )
        assert ann.fine_tuning.jobs.retrieve(job).status == "succeeded"
        assert served.log.read_text().count("the engine died") <= 6


def test_a_line_that_kills_servers_is_set_aside_and_the_server_stays(tmp_path: Path):
    """And so it is once with a real `kill -9` between, which is nobody's fault."""
    home, batch, starts = tmp_path / "home", None, 0
    lines = [completion("good"), completion("bad", "poison"), completion("better")]
    while True:
        starts += 1
        assert starts <= 6, "the server dies at each start"
        try:
            served = Served(home=home, before=DEADLY_FOR_SERVERS)
        except AssertionError:  # it was killed before it was ready
            continue
        try:
            client: Any = served.client()
            batch = batch or begin(client, lines, endpoint=COMPLETIONS)
            done = wait_for(client, batch)
        except Exception:  # the server is gone
            served.process.wait(60)
            served.stop()
            continue
        assert done.status == "completed"
        assert sorted(results(client, done.output_file_id)) == ["better", "good"]
        assert results(client, done.error_file_id)["bad"]["error"]["code"] == "engine_died"
        served.stop()
        break
    assert starts == 5


def test_lines_that_were_under_way_when_servers_were_killed_are_answered(tmp_path: Path):
    home = tmp_path / "home"
    lines = [completion(f"{n}", max_tokens=300, ignore_eos=True) for n in range(60)]
    batch = None
    for _ in range(4):
        served = Served(home=home)
        client: Any = served.client()
        batch = batch or begin(client, lines, endpoint=COMPLETIONS)
        before = client.batches.retrieve(batch.id).request_counts.completed

        def is_under_way(client: Any = client, before: int = before, id: str = batch.id) -> bool:
            found = client.batches.retrieve(id)
            return found.status in BATCH_OVER or found.request_counts.completed > before

        served.wait_until(is_under_way)
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait(60)
        served.stop()
    assert batch is not None
    with serving(home=home) as served:
        done = wait_for(served.client(), batch, 240)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == (
            "completed",
            60,
            0,
        )
