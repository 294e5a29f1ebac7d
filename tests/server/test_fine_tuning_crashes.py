"""`kill -9` of the engine's process and of the whole server while jobs run: every job finishes as
if nothing had happened; and what a job makes is what PEFT makes.
"""

import json
import os
import signal
import time
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import openai
import pytest
import torch
from job_data import adapter_in, distance
from peft import LoraConfig, PeftModel, get_peft_model
from served import is_alive, model, model_directory, serving, tokenizer
from support import summed_loss

from coserve.tuning.examples import read_examples

pytestmark = pytest.mark.long

LINES = [
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n * n}."}) for n in range(30)
]
DATA = "\n".join(LINES).encode()
ADAPTER = {"type": "lora", "r": 4, "alpha": 8, "target_modules": "all-linear", "dropout": 0.1}
CRASHED = {"adapter": ADAPTER, "optimizer": {"learning_rate": 5e-3}, "checkpoint_every_steps": 15}
NUM_STEPS = 200  # twenty epochs of ten batches


def create(client):
    file = client.files.create(file=("data.jsonl", DATA), purpose="fine-tune")
    hyperparameters = {"n_epochs": 20, "batch_size": 3}
    return client.fine_tuning.jobs.create(
        model="small",
        training_file=file.id,
        validation_file=file.id,
        seed=5,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        extra_body={"coserve": CRASHED},
    )


def steps_done(client, job):
    try:
        return client.fine_tuning.jobs.retrieve(job.id).model_extra["coserve"]["step"]
    except (openai.APIConnectionError, openai.InternalServerError):
        return 0


def over(client, job):
    try:
        found = client.fine_tuning.jobs.retrieve(job.id)
    except (openai.APIConnectionError, openai.InternalServerError):
        return None
    return found if found.status in ("succeeded", "failed", "cancelled") else None


def wait_for_a_step(served, client, job):
    done = steps_done(client, job)
    served.wait_until(lambda: steps_done(client, job) > done or over(client, job))


def train_losses(client, job):
    data = [
        event.data
        for event in client.fine_tuning.jobs.list_events(job.id, limit=50)
        if event.type == "metrics"
    ]
    return [(each["step"], each["train_loss"]) for each in reversed(data) if "train_loss" in each]


def final_adapter(home: Path, client, job):
    last = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id)))
    assert last.step_number == NUM_STEPS
    return adapter_in(home / "jobs" / job.id / "checkpoints" / f"step-{NUM_STEPS}")


@pytest.fixture(scope="module")
def undisturbed():
    with serving() as served:
        client = served.client()
        job = create(client)
        assert served.wait_until(lambda: over(client, job), limit_s=120).status == "succeeded"
        return train_losses(client, job), final_adapter(served.home, client, job)


def check(served, client, job, undisturbed):
    found = over(client, job)
    assert found.status == "succeeded", found.error
    losses, adapter = undisturbed
    mine = train_losses(client, job)
    assert [step for step, _ in mine] == list(range(1, NUM_STEPS + 1))
    assert [loss for _, loss in mine] == pytest.approx([loss for _, loss in losses], rel=1e-4)
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [each.step_number for each in checkpoints] == [NUM_STEPS, *range(195, 0, -15)]
    (directory,) = (served.home / "jobs" / job.id / "checkpoints").glob(f"step-{NUM_STEPS}*")
    assert distance(adapter_in(directory), adapter) < 1e-5
    answer = client.completions.create(
        model=found.fine_tuned_model, prompt="What is 3? ", max_tokens=3
    )
    assert answer.usage.completion_tokens > 0
    (results,) = found.result_files
    assert client.files.content(results).read().count(b"\n") == NUM_STEPS + 1


def test_the_engine_is_killed_again_and_again(undisturbed):
    rng = Random(1)
    with serving() as served:
        client = served.client()
        job = create(client)
        for _ in range(2):
            wait_for_a_step(served, client, job)
            time.sleep(rng.random() * 0.3)
            os.kill(served.engine_pid(), signal.SIGKILL)
            served.wait_until(lambda: served.get("/ready").status_code == 200)
        served.wait_until(lambda: over(client, job), limit_s=120)
        check(served, client, job, undisturbed)


def test_the_whole_server_is_killed_again_and_again(undisturbed):
    rng, job = Random(2), None
    home = Path(mkdtemp(prefix="coserve-home-"))
    for _ in range(2):
        with serving(home=home) as served:
            client = served.client()
            job = job or create(client)
            wait_for_a_step(served, client, job)
            time.sleep(rng.random() * 0.3)
            engine = served.engine_pid()
            served.process.kill()
            served.process.wait()
            served.wait_until(lambda engine=engine: not is_alive(engine))
    with serving(home=home) as served:
        client = served.client()
        served.wait_until(lambda: over(client, job), limit_s=120)
        check(served, client, job, undisturbed)


def test_a_server_that_ends_in_good_order_loses_no_step(undisturbed):
    home = Path(mkdtemp(prefix="coserve-home-"))
    with serving(home=home) as served:
        client = served.client()
        job = create(client)
        served.wait_until(lambda: steps_done(client, job) > 3)
        done = steps_done(client, job)
    with serving(home=home) as served:
        client = served.client()
        served.wait_until(lambda: over(client, job), limit_s=120)
        check(served, client, job, undisturbed)
        messages = [
            event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=1000)
        ]
        starts = [
            int(each.rsplit(" ", 1)[1])
            for each in messages
            if each.startswith("Fine-tuning resumes")
        ]
        assert all(step >= done for step in starts)


def test_a_job_that_continues_with_an_adapter_ends_where_peft_ends(tmp_path):
    """LoRA from PEFT's directory, loaded by path; three epochs as the lines stand; float32."""
    start = tmp_path / "start"
    settings = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    network = get_peft_model(_fresh_model(), settings)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    network.save_pretrained(start)
    with serving("--allow-adapter-paths", str(tmp_path)) as served:
        client = served.client()
        loaded = served.post(
            "/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": str(start)}
        )
        assert loaded.status_code == 200, loaded.text
        file = client.files.create(file=("data.jsonl", DATA), purpose="fine-tune")
        optimizer = {"learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 0, "eps": 1e-6}
        job = client.fine_tuning.jobs.create(
            model="mine",
            training_file=file.id,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 4}},
            },
            extra_body={"coserve": {"optimizer": optimizer, "shuffle": False}},
        )
        assert served.wait_until(lambda: over(client, job), limit_s=120).status == "succeeded"
        last = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id)))
        ours = adapter_in(
            served.home / "jobs" / job.id / "checkpoints" / f"step-{last.step_number}"
        )
        losses = [loss for _, loss in train_losses(client, job)]
    network = PeftModel.from_pretrained(_fresh_model(), start, is_trainable=True)
    theirs = peft_training(network, batch_size=4, num_epochs=3)
    assert losses == pytest.approx(theirs, rel=1e-4)
    trained = {
        n.replace(".default", ""): p.detach() for n, p in network.named_parameters() if "lora_" in n
    }
    assert distance(ours, trained) < 1e-4


def _fresh_model():
    return type(model()).from_pretrained(model_directory(), dtype=torch.float32)


def peft_training(network, *, batch_size, num_epochs):
    """By autograd and torch's AdamW; the loss of each step."""
    examples = read_examples(LINES, tokenizer(), max_sequence_length=512)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.1, eps=1e-6)
    losses = []
    for _ in range(num_epochs):
        for first in range(0, len(examples), batch_size):
            batch = examples[first : first + batch_size]
            adamw.zero_grad()
            loss = summed_loss(network, [(list(each.tokens), list(each.trained)) for each in batch])
            loss = loss / sum(each.num_trained for each in batch)
            loss.backward()
            adamw.step()
            losses.append(float(loss.detach()))
    return losses
