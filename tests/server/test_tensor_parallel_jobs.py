"""Jobs under `coserve up --tensor-parallel 2`: they learn what they learn on one rank, also when
ranks are killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from lengths import NUM_RANK_KILLS
from processes import children_of, is_alive
from served import Served
from served_ranks import check_answers, needs_two_cores, ranks_of, serving_on_two_ranks

pytestmark = needs_two_cores

LINES = [
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(30)
]
NUM_STEPS = 40  # four epochs of ten batches
ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def divided() -> Iterator[Served]:
    with serving_on_two_ranks() as running:
        yield running


def create(served: Served, checkpoint_every_steps: int = 10, num_epochs: int = 4) -> str:
    """Start a job of ten steps an epoch."""
    client = served.client()
    file = client.files.create(file=("data.jsonl", "\n".join(LINES).encode()), purpose="fine-tune")
    settings = {
        "adapter": {
            "type": "lora",
            "r": 4,
            "alpha": 8,
            "target_modules": "all-linear",
            "dropout": 0.1,
        },
        "optimizer": {"learning_rate": 5e-3},
        "checkpoint_every_steps": checkpoint_every_steps,
    }
    hyperparameters: Any = {"n_epochs": num_epochs, "batch_size": 3}
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=file.id,
        seed=5,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        extra_body={"coserve": settings},
    )
    return job.id


def retrieved(served: Served, job: str) -> Any:
    """Return a job; None while the server has no engine that could answer."""
    try:
        return served.client().fine_tuning.jobs.retrieve(job)
    except (openai.APIConnectionError, openai.InternalServerError):
        return None


def is_over(served: Served, job: str) -> bool:
    state = retrieved(served, job)
    return state is not None and state.status in ENDED


def losses(served: Served, job: str) -> dict[int, float]:
    """Return the training loss of each step."""
    events: list[Any] = [
        each.data for each in served.client().fine_tuning.jobs.list_events(job, limit=1000)
    ]
    return {each["step"]: each["train_loss"] for each in events if each and "train_loss" in each}


def test_a_job_beside_requests_learns_what_one_rank_learns(divided: Served, served: Served):
    jobs = {server: create(server) for server in (served, divided)}
    while not all(is_over(server, job) for server, job in jobs.items()):
        check_answers(divided)
    for server, job in jobs.items():
        assert retrieved(server, job).status == "succeeded", server.log.read_text()
    alone, both = (losses(server, job) for server, job in jobs.items())
    assert sorted(both) == list(range(1, NUM_STEPS + 1))
    assert both == pytest.approx(alone, rel=1e-4)
    tuned = [retrieved(server, job).fine_tuned_model for server, job in jobs.items()]
    said = [
        server.client().completions.create(
            model=name, prompt="What is 3? ", max_tokens=8, temperature=0
        )
        for (server, _), name in zip(jobs.items(), tuned, strict=True)
    ]
    assert said[0].choices[0].text == said[1].choices[0].text


def test_a_rank_that_is_killed_ends_the_group_at_once_and_the_next_one_continues():
    with serving_on_two_ranks() as served:
        job = create(served, checkpoint_every_steps=2)
        served.wait_until(lambda: len(ranks_of(served)) == 2)
        served.wait_until(lambda: retrieved(served, job).to_dict()["coserve"]["step"] > 2)
        for victim in (1, 0):
            engine, pids = served.engine_pid(), [each["pid"] for each in ranks_of(served)]
            os.kill(pids[victim], signal.SIGKILL)
            served.wait_until(
                lambda pids=pids, engine=engine: not any(map(is_alive, (*pids, engine))), limit_s=30
            )
            served.wait_until(
                lambda pids=pids: len(new := ranks_of(served)) == 2 and new[0]["pid"] not in pids
            )
            answer = served.client().completions.create(
                model="small", prompt="x", max_tokens=4, temperature=0
            )
            assert answer.choices[0].text
        served.wait_until(lambda: is_over(served, job), limit_s=240)
        assert retrieved(served, job).status == "succeeded"
        events: list[Any] = [
            each.data for each in served.client().fine_tuning.jobs.list_events(job, limit=1000)
        ]
        steps = sorted(each["step"] for each in events if each and "train_loss" in each)
        assert steps == list(range(1, NUM_STEPS + 1)), "no step is lost, and none counts twice"
        last = [each["pid"] for each in ranks_of(served)]
    assert not any(map(is_alive, last)), "the server's end is theirs"


def test_what_two_ranks_did_can_be_run_again_on_one(tmp_path: Path):
    file = tmp_path / "recording"
    with serving_on_two_ranks("--record", str(file)) as served:
        job = create(served)
        served.wait_until(lambda: is_over(served, job) or check_answers(served), limit_s=240)
        assert retrieved(served, job).status == "succeeded"
    done = subprocess.run(
        [sys.executable, "-m", "coserve", "replay", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["plans_equal"] and report["tokens_equal"] and report["steps"] > NUM_STEPS
    assert report["max_loss_difference"] < 1e-3


@pytest.mark.long
def test_a_job_loses_nothing_while_ranks_are_killed_again_and_again(served: Served):
    """Ranks are killed at any moment of a step, a command or a checkpoint, and every fifth time of
    a start.

    Starts that fail in a row are put off for longer each time, up to half a minute; so no two
    starts in a row are killed.
    """
    rng, num_epochs = Random(0), 20
    undisturbed = create(served, num_epochs=num_epochs)
    with serving_on_two_ranks() as killed:
        job = create(killed, checkpoint_every_steps=1, num_epochs=num_epochs)
        for number in range(NUM_RANK_KILLS):
            engine = killed.wait_until(lambda: engine_of(killed))
            find_ranks = started_ranks if number % 5 == 4 else ready_ranks
            pids = killed.wait_until(
                lambda find=find_ranks, engine=engine: find(killed, engine), limit_s=120
            )
            time.sleep(rng.random())
            os.kill(rng.choice(pids), signal.SIGKILL)
            killed.wait_until(lambda all=(*pids, engine): not any(map(is_alive, all)), limit_s=30)
        killed.wait_until(lambda: is_over(killed, job), limit_s=240)
        assert retrieved(killed, job).status == "succeeded", killed.log.read_text()
        disturbed_losses = losses(killed, job)
    assert sorted(disturbed_losses) == list(range(1, 10 * num_epochs + 1))
    served.wait_until(lambda: is_over(served, undisturbed), limit_s=240)
    assert disturbed_losses == pytest.approx(losses(served, undisturbed), rel=1e-4)


def engine_of(served: Served) -> int | None:
    """Return the engine's process; None while there is none."""
    forks = children_of(served.fork_server_pid())
    return forks[0] if forks else None


def started_ranks(served: Served, engine: int) -> list[int]:
    """Return the processes that an engine has started for its ranks; none before it has."""
    return children_of(engine)


def ready_ranks(served: Served, engine: int) -> list[int]:
    """Return the ranks of an engine that is ready; none before it is."""
    pids = [each["pid"] for each in ranks_of(served)]
    return pids if set(pids) <= set(children_of(engine)) else []
