"""The best checkpoint of a job, and jobs that end early, over HTTP; also after the engine was
killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from served import Served, serving

ROOT = str(Path(__file__).parents[2])
TRAINED = "".join(
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n}."}) + "\n" for n in range(12)
)
# Another answer to the same questions: the more is learned, the worse it fits.
HELD_OUT = "".join(
    json.dumps({"prompt": f"What is {n}? ", "completion": "Jumps lazy fox"}) + "\n"
    for n in range(3)
)
ADAPTER = {"type": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
SETTINGS: dict[str, Any] = {
    "adapter": ADAPTER,
    "optimizer": {"learning_rate": 5e-2},
    "checkpoint_every_steps": 4,
    "evaluate_every_steps": 1,
}
EARLY = {**SETTINGS, "keep_best": True, "early_stopping": {"patience": 3}}


def start(served: Served, **coserve: Any) -> Any:
    client: Any = served.client()
    files = [
        client.files.create(file=("data.jsonl", text.encode()), purpose="fine-tune").id
        for text in (TRAINED, HELD_OUT)
    ]
    return client.fine_tuning.jobs.create(
        model="small",
        training_file=files[0],
        validation_file=files[1],
        seed=7,
        hyperparameters={"n_epochs": 10, "batch_size": 3},
        extra_body={"coserve": coserve},
    )


def finished(served: Served, job: Any) -> Any:
    def over() -> Any:
        found = served.client().fine_tuning.jobs.retrieve(job.id)
        return found if found.status in ("succeeded", "failed", "cancelled") else None

    done = served.wait_until(over, limit_s=120)
    assert done.status == "succeeded", done.error
    return done


def events(served: Served, job: Any) -> list[Any]:
    return list(served.client().fine_tuning.jobs.list_events(job.id, limit=100))[::-1]


def valid_losses(served: Served, job: Any) -> dict[int, float]:
    return {
        each.data["step"]: each.data["valid_loss"]
        for each in events(served, job)
        if "valid_loss" in (each.data or {})
    }


def weights(served: Served, job: Any, step: int | None = None) -> bytes:
    query = "" if step is None else f"?step={step}"
    return served.get(
        f"/v1/fine_tuning/jobs/{job.id}/adapter/adapter_model.safetensors{query}"
    ).content


def answer(served: Served, model: str) -> str:
    made = served.client().completions.create(
        model=model, prompt="What is 3? ", max_tokens=8, temperature=0, logprobs=1
    )
    return str((made.choices[0].text, made.choices[0].logprobs.token_logprobs))


@pytest.fixture(scope="module")
def stopped(device_server: Served) -> Any:
    return finished(device_server, start(device_server, **EARLY))


def test_a_job_ends_when_its_validation_does_not_improve(device_server: Served, stopped: Any):
    losses = valid_losses(device_server, stopped)
    best = min(losses, key=lambda step: losses[step])
    assert sorted(losses) == list(range(1, best + 4)), "three evaluations beyond the best"
    assert (
        stopped.coserve["stopped_early"]
        and stopped.coserve["step"] == best + 3 < stopped.coserve["total_steps"]
    )
    messages = [each.message for each in events(device_server, stopped)]
    assert (
        f"Stopped early at step {best + 3} of 40: loss of the validation file has not improved in "
        f"3 evaluations" in messages
    )
    steps = [each for each in events(device_server, stopped) if "train_loss" in (each.data or {})]
    assert stopped.trained_tokens == sum(each.data["num_tokens"] for each in steps)


def test_the_model_is_the_best_checkpoint(device_server: Served, stopped: Any):
    losses = valid_losses(device_server, stopped)
    best = min(losses, key=lambda step: losses[step])
    assert stopped.coserve["best_step"] == best
    checkpoints: list[Any] = list(
        device_server.client().fine_tuning.jobs.checkpoints.list(stopped.id)
    )
    marks = {each.step_number: each.coserve["is_best"] for each in checkpoints}
    assert [step for step, is_best in marks.items() if is_best] == [best] and max(marks) == best + 3
    assert weights(device_server, stopped) == weights(device_server, stopped, best)
    assert weights(device_server, stopped) != weights(device_server, stopped, best + 3)
    names = {each.step_number: each.fine_tuned_model_checkpoint for each in checkpoints}
    assert answer(device_server, stopped.fine_tuned_model) == answer(device_server, names[best])
    assert answer(device_server, stopped.fine_tuned_model) != answer(device_server, names[best + 3])
    message = (
        f"New fine-tuned model created: {stopped.fine_tuned_model}, the checkpoint of step {best}"
    )
    assert message in [each.message for each in events(device_server, stopped)]


def test_without_keep_best_the_model_is_the_last_step(device_server: Served):
    job = finished(device_server, start(device_server, **{**EARLY, "keep_best": False}))
    last = job.coserve["step"]
    assert job.coserve["stopped_early"] and job.coserve["best_step"] < last
    assert weights(device_server, job) == weights(device_server, job, last)


def test_a_job_that_is_not_to_stop_keeps_its_best_after_all_steps(device_server: Served):
    job = finished(device_server, start(device_server, **SETTINGS, keep_best=True))
    losses = valid_losses(device_server, job)
    best = min(losses, key=lambda step: losses[step])
    assert (job.coserve["step"], job.coserve["stopped_early"], job.coserve["best_step"]) == (
        40,
        False,
        best,
    )
    assert (
        weights(device_server, job)
        == weights(device_server, job, best)
        != weights(device_server, job, 40)
    )


@pytest.mark.parametrize(
    ("coserve", "param"),
    [
        ({"early_stopping": {"patience": 0}}, "coserve.early_stopping"),
        ({"early_stopping": {"min_delta": -1}}, "coserve.early_stopping"),
        ({"early_stopping": {"patiense": 1}}, "coserve.early_stopping.patiense"),
        ({"early_stopping": {}, "evaluate_every_steps": 0}, "coserve.early_stopping"),
        ({"keep_best": 1}, "coserve.keep_best"),
        ({"keep_best": True, "live": True}, "coserve.keep_best"),
        ({"keep_best": True, "evaluate_every_steps": 0}, "coserve.keep_best"),
        ({"keep_best": True, "adapter": {"type": "full"}, "live": True}, "coserve.keep_best"),
        ({"best_metric": "bleu"}, "coserve.best_metric"),
        ({"best_metric": "exact_match"}, "coserve.best_metric"),
    ],
)
def test_settings_that_are_refused(device_server: Served, coserve: dict[str, Any], param: str):
    with pytest.raises(BadRequestError) as raised:
        start(device_server, **{**SETTINGS, **coserve})
    assert raised.value.param == param


def test_a_validation_file_is_needed(device_server: Served):
    client: Any = device_server.client()
    file = client.files.create(file=("data.jsonl", TRAINED.encode()), purpose="fine-tune").id
    for name, value in (("keep_best", True), ("early_stopping", {})):
        with pytest.raises(BadRequestError, match="needs a validation_file"):
            client.fine_tuning.jobs.create(
                model="small", training_file=file, extra_body={"coserve": {**SETTINGS, name: value}}
            )


@pytest.mark.long
@pytest.mark.parametrize("when", ["before the best", "after the best"])
def test_the_same_comes_out_when_the_engine_is_killed(
    device_server: Served, stopped: Any, when: str
):
    best = stopped.coserve["best_step"]
    step = max(1, best - 1) if when == "before the best" else best + 1
    with serving() as served:
        job = start(served, **EARLY)
        served.wait_until(lambda: max(valid_losses(served, job), default=0) >= step)
        os.kill(served.engine_pid(), signal.SIGKILL)
        done = finished(served, job)
        assert valid_losses(served, done) == pytest.approx(valid_losses(device_server, stopped))
        for name in ("best_step", "stopped_early", "step"):
            assert done.coserve[name] == stopped.coserve[name]
        assert weights(served, done) == weights(device_server, stopped)


@pytest.mark.long
def test_the_command_has_the_settings(device_server: Served, tmp_path: Path):
    (tmp_path / "data.jsonl").write_text(TRAINED)
    (tmp_path / "held.jsonl").write_text(HELD_OUT)
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "coserve",
                "tune",
                str(tmp_path / "data.jsonl"),
                "--epochs",
                "10",
            ),
            *(
                "--validation",
                str(tmp_path / "held.jsonl"),
                "--keep-best",
                "--patience",
                "1",
                "--min-delta",
                "100",
            ),
            *("--checkpoint-every", "1", "--batch-size", "3", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COSERVE_URL": device_server.url, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr
    job = device_server.get("/v1/fine_tuning/jobs").json()["data"][0]
    assert job["coserve"]["step"] == 2 and job["coserve"]["stopped_early"], (
        "the second is not better by 100"
    )
