"""Adapters whose settings are meant to do harm: nothing hangs, nothing is taken, and the answer
says why."""

import json
import shutil
from math import nan
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from served import Served, adapter_root, peft_model

EVIL = "([a-z_.0-9]+)+X"
DATA = b'{"text": "a"}\n' * 4


def job(served: Served, adapter: dict[str, Any]):
    client = served.client()
    file = client.files.create(file=("data.jsonl", DATA), purpose="fine-tune")
    body = {"model": "small", "training_file": file.id, "coserve": {"adapter": adapter}}
    return served.post("/v1/fine_tuning/jobs", json=body)


def is_well(served: Served) -> None:
    assert served.get("/health").status_code == 200
    assert served.client().completions.create(model="small", prompt="x", max_tokens=1)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"target_modules": EVIL}, "matches no linear layer"),
        ({"target_modules": r"(q)_proj\1"}, "RE2, which has no backreferences, look-around"),
        ({"exclude_modules": "(?=q).*"}, "RE2, which has no backreferences, look-around"),
        ({"rank_pattern": {"(?<!q)_proj": 2}}, "RE2, which has no backreferences, look-around"),
        ({"alpha_pattern": {"x" * 5000: 2}}, "4096 are allowed"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "(?!x)"},
            "RE2",
        ),
        ({"r": 10_000_000}, "is 10000000; a rank above the model's 32 adds nothing"),
        (
            {"rank_pattern": {"q_proj": 10_000_000}},
            "is 10000000; a rank above the model's 32 adds nothing",
        ),
        ({"r": 2**70}, "must be a whole number from 1 to 2147483647"),
    ],
)
def test_settings_of_a_job_are_refused_at_once(served: Served, adapter: dict[str, Any], said: str):
    answer = job(served, adapter)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("coserve.adapter")
    is_well(served)


@pytest.mark.parametrize("setting", ["exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_job_with_patterns_that_backtrack_runs(served: Served, setting: str):
    value = EVIL if setting == "exclude_modules" else {EVIL: 2}
    made = job(served, {"r": 4, "target_modules": ["q_proj"], setting: value})
    assert made.status_code == 200, made.text
    jobs = served.client().fine_tuning.jobs
    served.wait_until(
        lambda: jobs.retrieve(made.json()["id"]).status in ("succeeded", "failed"), limit_s=120
    )
    assert jobs.retrieve(made.json()["id"]).status == "succeeded"


def changed(name: str, **fields: object) -> Path:
    """The adapter of PEFT with other fields in its configuration."""
    peft_model()
    directory = adapter_root() / name
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(adapter_root() / "pirate", directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return directory


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": EVIL}, "matches no linear layer"),
        ({"target_modules": r"(.*)\1"}, "RE2, which has no backreferences, look-around"),
        ({"r": 10_000_000}, "needs [10000000, 32]"),
        ({"rank_pattern": {"q_proj": 10_000_000}}, "needs [10000000, 32]"),
        ({"r": 2**70}, "must be a whole number from 1 to 2147483647"),
        ({"lora_alpha": 1e300}, "must be a number above 0 and at most"),
    ],
)
def test_a_directory_is_refused_with_the_reason(served: Served, fields: dict[str, Any], said: str):
    body = {"lora_name": "hostile", "lora_path": str(changed("hostile", **fields))}
    answer = served.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    is_well(served)


def test_numbers_that_are_not_finite_are_refused_by_file_and_tensor(served: Served):
    path = changed("spoilt") / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    tensors[name].view(-1)[0] = nan
    save_file(tensors, path, metadata={"format": "pt"})
    answer = served.post(
        "/v1/load_lora_adapter", json={"lora_name": "spoilt", "lora_path": str(path.parent)}
    )
    assert answer.status_code == 400, answer.text
    assert f"{path}: {name} has numbers that are NaN" in answer.json()["error"]["message"]
    assert "spoilt" not in [model.id for model in served.client().models.list()]
    is_well(served)


def test_a_directory_with_patterns_that_backtrack_is_served(served: Served):
    directory = changed(
        "slow", exclude_modules=EVIL, rank_pattern={EVIL: 2}, alpha_pattern={EVIL: 3}
    )
    answer = served.post(
        "/v1/load_lora_adapter", json={"lora_name": "slow", "lora_path": str(directory)}
    )
    assert answer.status_code == 200, answer.text
    assert served.client().completions.create(model="slow", prompt="x", max_tokens=1)
    assert served.post("/v1/unload_lora_adapter", json={"lora_name": "slow"}).status_code == 200
