"""`coserve export`: what a job has made, as files; and jobs of other methods than LoRA over
HTTP."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import PeftModel
from served import model_directory, serving, tokenizer
from transformers import AutoModelForCausalLM

ROOT = str(Path(__file__).parents[2])
DATA = "".join(
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n}."}) + "\n" for n in range(6)
).encode()


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "coserve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A home, and the names of models that jobs of several methods have made there."""
    home, names = tmp_path_factory.mktemp("home"), {}
    methods = {
        "dora": {"type": "lora", "r": 4, "use_dora": True},
        "ia3": {"type": "ia3", "target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
        "prompt": {"type": "prompt_tuning", "num_virtual_tokens": 4},
    }
    with serving(home=home) as served:
        client = served.client()
        file = client.files.create(file=("data.jsonl", DATA), purpose="fine-tune").id
        jobs = {
            name: client.fine_tuning.jobs.create(
                model="small",
                training_file=file,
                suffix=name,
                method={
                    "type": "supervised",
                    "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 3}},
                },
                extra_body={"coserve": {"adapter": adapter}},
            )
            for name, adapter in methods.items()
        }

        def over(job):
            found = client.fine_tuning.jobs.retrieve(job.id)
            return found if found.status in ("succeeded", "failed", "cancelled") else None

        for name, job in jobs.items():
            found = served.wait_until(lambda job=job: over(job), limit_s=120)
            assert found.status == "succeeded", found.error
            names[name] = found.fine_tuned_model
            answer = client.completions.create(model=names[name], prompt="What is 3?", max_tokens=4)
            assert answer.usage.completion_tokens == 4
    return home, names


def test_an_adapter_by_itself_is_what_peft_reads(trained, tmp_path):
    home, names = trained
    done = run("export", names["ia3"], str(tmp_path / "out"), "--home", str(home))
    assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(model_directory())
    assert PeftModel.from_pretrained(base, tmp_path / "out").active_peft_config.peft_type == "IA3"
    again = run("export", names["ia3"], str(tmp_path / "out"), "--home", str(home))
    assert "is not empty: choose a new or empty directory" in again.stderr


@pytest.mark.long
def test_merged_it_is_a_model_of_its_own(trained, tmp_path):
    home, names = trained
    adapter, merged = str(tmp_path / "adapter"), str(tmp_path / "merged")
    assert run("export", names["dora"], adapter, "--home", str(home)).returncode == 0
    model = ("--model", str(model_directory()))
    done = run("export", names["dora"], merged, "--merge", *model, "--home", str(home), "--json")
    assert json.loads(done.stdout)["merged"], done.stderr
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, adapter)(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    refused = run(
        "export", names["prompt"], str(tmp_path / "no"), "--merge", *model, "--home", str(home)
    )
    assert "PROMPT_TUNING adapters cannot be merged" in refused.stderr


def test_what_is_not_there_is_said_with_what_is(trained, tmp_path):
    home, names = trained
    done = run("export", "nothing", str(tmp_path / "out"), "--home", str(home))
    assert done.returncode == 1
    assert "there is no finished model 'nothing'; there are: " in done.stderr
    assert names["dora"] in done.stderr
    done = run("up", "ft:nothing", "--home", str(home))
    assert "there is no finished model 'ft:nothing'; there are: " in done.stderr
    done = run("up", names["dora"], "--home", str(home))
    assert (
        f"{names['dora']} is an adapter: serve its base model, small, which then serves it by its name"
        in done.stderr
    )


def test_full_weights_over_http(tmp_path):
    """Served step by step, and then by its name and as files, which transformers loads, too."""
    with serving(home=tmp_path) as served:
        client = served.client()
        asked: dict[str, Any] = {
            "model": "small",
            "training_file": client.files.create(file=("d.jsonl", DATA), purpose="fine-tune").id,
        }
        full = {"adapter": {"type": "full"}, "checkpoint_every_steps": 0}
        with pytest.raises(
            openai.BadRequestError, match=r"coserve\.live must be true for full fine-tuning"
        ):
            client.fine_tuning.jobs.create(**asked, extra_body={"coserve": full})
        job = client.fine_tuning.jobs.create(
            **asked,
            extra_body={"coserve": {**full, "live": True, "optimizer": {"learning_rate": 1e-3}}},
        )
        states = ("succeeded", "failed")
        served.wait_until(
            lambda: client.fine_tuning.jobs.retrieve(job.id).status in states, limit_s=120
        )
        done = client.fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded", done.error
        greedy: dict[str, Any] = {"prompt": "What is 3? ", "max_tokens": 8, "temperature": 0}
        texts = {
            client.completions.create(model=m, **greedy).choices[0].text
            for m in ("small", done.fine_tuned_model)
        }
        assert len(texts) == 1, "the base is what was trained"
        checkpoint = (
            client.fine_tuning.jobs.checkpoints.list(job.id).data[0].fine_tuned_model_checkpoint
        )
        with pytest.raises(
            openai.NotFoundError, match=r"a model of its own.*no adapter: `coserve up` serves it"
        ):
            client.completions.create(model=checkpoint, **greedy)
    name, exported = done.fine_tuned_model, tmp_path / "exported"
    assert run("export", job.id, str(exported), "--home", str(tmp_path)).returncode == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in exported.iterdir()
    }
    assert not {"coserve_full.json", "job.json"} & {path.name for path in exported.iterdir()}
    with serving(home=tmp_path, model=name) as served:
        assert served.client().models.list().data[0].id == name
        assert served.client().completions.create(model=name, **greedy).choices[0].text in texts
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ids = tokenizer()("What is 3? ", return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    assert tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True) == texts.pop()
