"""Jobs on a model that the server does not serve, over HTTP: trained beside requests, fetched,
trained further."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError
from served import Served, model_directory, serving, tokenizer
from support import random_weights_
from transformers import AutoConfig, AutoModelForCausalLM

from coserve.adapters.peft_directory import load_adapter
from coserve.models import load_backbone
from coserve.server.config import ServerConfig

LINES = [
    {"prompt": "The opposite of hot is", "completion": " cold."},
    {"prompt": "Hello", "completion": " world"},
]
LORA = {"type": "lora", "r": 4, "target_modules": "all-linear"}
OPTIMIZER = {"learning_rate": 1e-2}


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """Of another family than the one that serves, and larger."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    network: Any = random_weights_(AutoModelForCausalLM.from_config(config), 3)
    directory = Path(tmp_path_factory.mktemp("other")) / "weights"
    network.tie_weights()
    network.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(big: Path) -> Iterator[Served]:
    with serving("--trainable-model", f"big={big}", "--weight-window", "4MB") as served:
        yield served


def create(served: Served, model: str, *, epochs: int = 4, **extension: Any) -> Any:
    client = served.client()
    file = client.files.create(
        file=("data.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="fine-tune"
    )
    return client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        seed=1,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": 2}},
        },
        extra_body={"coserve": {"optimizer": OPTIMIZER} | extension},
    )


def finished(served: Served, job: Any) -> Any:
    jobs = served.client().fine_tuning.jobs
    done = served.wait_until(
        lambda: (
            (now := jobs.retrieve(job.id)).status in ("succeeded", "failed", "cancelled") and now
        )
    )
    assert done.status == "succeeded", done.error
    return done


def losses(served: Served, job: Any) -> list[float]:
    events: list[Any] = served.client().fine_tuning.jobs.list_events(job.id, limit=100).data
    return [event.data["train_loss"] for event in reversed(events) if event.type == "metrics"]


def directory_of(served: Served, job: Any) -> Path:
    return max((served.home / "jobs" / job.id / "checkpoints").glob("step-*"))


def test_a_job_trains_another_model_beside_requests_and_its_adapter_is_trained_further(big, served):
    client = served.client()
    job = create(served, "big", epochs=30, adapter=LORA)
    assert job.model == "big"
    while client.fine_tuning.jobs.retrieve(job.id).status not in ("succeeded", "failed"):
        assert (
            client.completions.create(model="small", prompt="Hello", max_tokens=4)
            .choices[0]
            .finish_reason
        )
    done = finished(served, job)
    assert done.fine_tuned_model.startswith("ft:big:")
    found = losses(served, job)
    assert found[-1] < found[0] / 2
    adapter = load_adapter(load_backbone(str(big), dtype="float32"), str(directory_of(served, job)))
    assert any(
        float(parameter.abs().max())
        for name, parameter in adapter.masters.items()
        if "lora_B" in name
    )

    further = create(served, done.fine_tuned_model)
    made = finished(served, further)
    assert made.fine_tuned_model.startswith("ft:big:")
    assert losses(served, further)[0] == pytest.approx(found[-1], rel=0.5)
    status = served.get("/v1/status").json()
    assert status["trainable_models"] == ["big"]
    metrics = served.get("/metrics").text
    (copied,) = [
        line
        for line in metrics.splitlines()
        if line.startswith("coserve_weight_window_copied_bytes ")
    ]
    assert float(copied.split()[1]) > 0

    assert made.fine_tuned_model not in [model.id for model in client.models.list()]
    for name in ("big", made.fine_tuned_model):
        with pytest.raises(NotFoundError, match="is not served: this server only trains big"):
            client.completions.create(model=name, prompt="Hello", max_tokens=4)
    assert client.models.delete(made.fine_tuned_model).deleted
    with pytest.raises(NotFoundError, match="does not exist"):
        create(served, made.fine_tuned_model)


def test_what_cannot_be_trained_is_refused_at_once(served):
    with pytest.raises(
        BadRequestError, match="big is trained here and not served: live must be false"
    ):
        create(served, "big", live=True)
    with pytest.raises(NotFoundError, match="'bigger' does not exist"):
        create(served, "bigger")
    with pytest.raises(BadRequestError, match="target_modules"):
        create(served, "big", adapter={"type": "lora", "target_modules": ["c_attn"]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("big",), "trainable_models must be NAME=MODEL, not 'big'"),
        (("=big",), "trainable_models must be NAME=MODEL"),
        (("a=x", "a=y"), "unique names"),
        (("a@1=x",), "without an @"),
    ],
)
def test_a_wrong_option_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(trainable_models=given)


def test_a_model_that_is_not_there_or_has_the_name_of_the_one_that_serves_ends_the_start(
    tmp_path, big
):
    for option, message in (
        (f"other={tmp_path / 'none'}", f"--trainable-model other={tmp_path / 'none'}: "),
        (f"{model_directory().name}={big}", "has the name of the model that serves"),
    ):
        with pytest.raises(AssertionError, match=message), serving("--trainable-model", option):
            pass
