"""What a job has made as one ZIP file: its adapter as PEFT reads it, or merged into its model."""

import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from served import Served, model_directory, tokenizer
from transformers import AutoModelForCausalLM

from coserve.server.fine_tuning.archives import zipped

DATA = "".join(
    json.dumps({"prompt": f"What is {n}? ", "completion": f"It is {n}."}) + "\n" for n in range(6)
).encode()


@pytest.fixture(scope="module")
def jobs(device_server: Served) -> dict[str, str]:
    """Ids of jobs that have succeeded, by their method."""
    client = device_server.client()
    file = client.files.create(file=("data.jsonl", DATA), purpose="fine-tune").id
    adapters = {
        "lora": {"type": "lora", "r": 4},
        "prompt": {"type": "prompt_tuning", "num_virtual_tokens": 4},
    }
    made = {}
    for name, adapter in adapters.items():
        settings = {"adapter": adapter, "optimizer": {"learning_rate": 0.01}}
        made[name] = client.fine_tuning.jobs.create(
            model="small",
            training_file=file,
            suffix=f"zip-{name}",
            hyperparameters={"n_epochs": 2, "batch_size": 3},
            extra_body={"coserve": settings},
        ).id
    for job in made.values():
        device_server.wait_until(
            lambda job=job: client.fine_tuning.jobs.retrieve(job).status == "succeeded"
        )
    return made


def archive(served: Served, job: str, query: str = "") -> zipfile.ZipFile:
    answer = served.get(f"/v1/fine_tuning/jobs/{job}/archive{query}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"].startswith('attachment; filename="ft-small-')
    found = zipfile.ZipFile(BytesIO(answer.content))
    assert found.testzip() is None
    return found


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor([tokenizer()("What is 3? ", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return model(ids).logits


def test_an_adapter_comes_as_its_files(device_server: Served, jobs: dict[str, str]):
    found = archive(device_server, jobs["lora"])
    names = {Path(name).name: name for name in found.namelist()}
    assert set(names) == {"adapter_config.json", "adapter_model.safetensors"}, (
        "nothing that only the job needs"
    )
    for name, path in names.items():
        one = device_server.get(f"/v1/fine_tuning/jobs/{jobs['lora']}/adapter/{name}")
        assert found.read(path) == one.content


def test_a_merged_model_answers_as_the_adapter_does(
    device_server: Served, jobs: dict[str, str], tmp_path: Path
):
    archive(device_server, jobs["lora"]).extractall(tmp_path / "adapter")
    archive(device_server, jobs["lora"], "?merge=true").extractall(tmp_path / "merged")
    [adapter], [merged] = (list((tmp_path / name).iterdir()) for name in ("adapter", "merged"))
    base = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    theirs = logits(PeftModel.from_pretrained(base, adapter))
    ours = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    run = device_server.home / "run"
    assert not list(run.glob("merged-*")), "nothing of it stays on the server"


def test_what_cannot_be_merged_or_is_not_there_is_refused(
    device_server: Served, jobs: dict[str, str]
):
    answer = device_server.get(f"/v1/fine_tuning/jobs/{jobs['prompt']}/archive?merge=true")
    assert answer.status_code == 400
    assert "PROMPT_TUNING adapters cannot be merged" in answer.json()["error"]["message"]
    assert device_server.get("/v1/fine_tuning/jobs/ftjob-none/archive").status_code == 404
    assert (
        device_server.get(f"/v1/fine_tuning/jobs/{jobs['lora']}/archive?step=12345").status_code
        == 404
    )


def test_an_archive_is_sent_in_pieces_while_it_is_written(tmp_path: Path):
    large = tmp_path / "large.bin"
    content = bytes(range(256)) * (5 << 12)
    large.write_bytes(content)
    pieces = list(zipped([large], folder="model"))
    assert max(map(len, pieces)) < 2 << 20 < len(content)
    assert zipfile.ZipFile(BytesIO(b"".join(pieces))).read("model/large.bin") == content
