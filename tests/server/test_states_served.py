"""Models whose requests carry states (Qwen3.5, and its mixture of experts as it is published, which
sees pictures, too), over HTTP: requests beside a job, and the adapter that comes of it.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import MORE_CONFIGS
from openai import BadRequestError
from served import Served, serving, tokenizer
from support import auto_class, random_weights_
from transformers import AutoConfig

LINES = [
    {"prompt": "The opposite of hot is", "completion": " cold."},
    {"prompt": "Hello", "completion": " world"},
]
PICTURE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PROMPTS = ("The quick brown fox", "Hello world, how are you today?", "One copy of the weights")


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5-moe-published"])
def directory(request: Any, tmp_path_factory: Any) -> Path:
    config, sizes = (
        MORE_CONFIGS[request.param],
        {"vocab_size": len(tokenizer()), "max_position_embeddings": 256},
    )
    config = (
        config | {"text_config": config["text_config"] | sizes}
        if "text_config" in config
        else config | sizes
    )
    model: Any = random_weights_(auto_class(config).from_config(AutoConfig.for_model(**config)))
    found = Path(tmp_path_factory.mktemp("states")) / "small"
    model.save_pretrained(found)
    tokenizer().save_pretrained(found)
    return found


def expected(model: Any, prompt: str) -> str:
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )
    return str(tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def asked(served: Served, prompt: str, model: str) -> str:
    found = served.client().completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    return found.choices[0].text


@pytest.mark.long
def test_requests_beside_a_job_answer_as_transformers_and_its_adapter_is_served(directory: Path):
    auto = auto_class(json.loads((directory / "config.json").read_text()))
    model: Any = auto.from_pretrained(directory, dtype=torch.float32).eval()
    with serving(model=str(directory)) as served:
        client = served.client()
        with pytest.raises(BadRequestError, match=r"content\[0\].type': Input should be 'text'"):
            client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": [PICTURE]}]
            )
        file = client.files.create(
            file=("d.jsonl", "\n".join(map(json.dumps, LINES)).encode()), purpose="fine-tune"
        )
        job = client.fine_tuning.jobs.create(
            model="small",
            training_file=file.id,
            seed=1,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 50, "batch_size": 2}},
            },
            extra_body={
                "coserve": {
                    "adapter": {"type": "lora", "r": 8, "target_modules": "all-linear"},
                    "optimizer": {"learning_rate": 1e-2},
                }
            },
        )
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            answers = list(threads.map(lambda prompt: asked(served, prompt, "small"), PROMPTS))
        assert answers == [expected(model, prompt) for prompt in PROMPTS]
        done = served.wait_until(
            lambda: (
                (now := client.fine_tuning.jobs.retrieve(job.id)).status in ("succeeded", "failed")
                and now
            )
        )
        assert done.status == "succeeded", done.error
        assert asked(served, LINES[0]["prompt"], done.fine_tuned_model).startswith(
            LINES[0]["completion"]
        )
        assert asked(served, PROMPTS[0], "small") == expected(model, PROMPTS[0])
