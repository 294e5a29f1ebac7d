"""Models of other shapes than the built-in one, fine-tuned over HTTP: the adapter is PEFT's after
the same steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import MORE_CONFIGS
from peft import PeftModel
from peft_training import train_by_autograd
from safetensors.torch import load_file
from served import serving, tokenizer
from support import random_weights_
from transformers import AutoConfig, AutoModelForCausalLM

from coserve.adapters import Adapter, LoraConfig, save_adapter
from coserve.models import load_backbone
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import read_examples

PROMPTS = ("The opposite of hot is", "Hello", "One copy of the weights", "12345", "How are you")
LINES = [{"prompt": prompt, "completion": f" and {prompt.lower()[::-1]}."} for prompt in PROMPTS]
TARGETS = {
    "gemma2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "falcon-new": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "qwen3-moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_job_over_http_makes_pefts_adapter(name: str, tmp_path: Path):
    sizes = {"vocab_size": len(tokenizer()), "eos_token_id": tokenizer().eos_token_id}
    config = AutoConfig.for_model(**MORE_CONFIGS[name] | sizes)
    model: Any = random_weights_(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    )
    model.tie_weights()
    directory = tmp_path / "small"
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    with serving(model=str(directory)) as served:
        client = served.client()
        file = client.files.create(
            file=("d.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="fine-tune"
        )
        job = client.fine_tuning.jobs.create(
            model="small",
            training_file=file.id,
            seed=3,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 2}},
            },
            extra_body={
                "coserve": {
                    "adapter": {
                        "type": "lora",
                        "r": 3,
                        "alpha": 6,
                        "target_modules": TARGETS[name],
                    },
                    "optimizer": {"learning_rate": 1e-2},
                }
            },
        )
        done = served.wait_until(
            lambda: (
                (now := client.fine_tuning.jobs.retrieve(job.id)).status in ("succeeded", "failed")
                and now
            )
        )
        assert done.status == "succeeded", done.error
        events: list[Any] = client.fine_tuning.jobs.list_events(job.id, limit=100).data
        losses = [event.data["train_loss"] for event in reversed(events) if event.type == "metrics"]
        (ours,) = (served.home / "jobs" / job.id / "checkpoints").glob(
            "step-9/adapter_model.safetensors"
        )
        found = load_file(ours)

    lora = LoraConfig(r=3, alpha=6, target_modules=tuple(TARGETS[name]))
    settings = TuningConfig(
        num_epochs=3, batch_size=2, seed=3, optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    save_adapter(
        Adapter(load_backbone(str(directory), dtype="float32"), lora, seed=settings.seed),
        tmp_path / "start",
    )
    fresh: Any = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    peft = PeftModel.from_pretrained(fresh, str(tmp_path / "start"), is_trainable=True)
    examples = read_examples(
        map(json.dumps, LINES), tokenizer(), max_sequence_length=config.max_position_embeddings
    )
    assert losses == pytest.approx(train_by_autograd(peft, examples, settings), rel=1e-4)
    peft.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert found.keys() == theirs.keys()
    for each in found:
        torch.testing.assert_close(found[each], theirs[each], atol=1e-4, rtol=0)
