"""Adapters that clients have loaded outlive the server; models that were deleted do not. Over real
restarts."""

import json
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

import openai
import pytest
from openai import OpenAI
from served import Served, adapter_root, expected, is_alive, peft_model, serving, tokenizer

LINES = [{"prompt": f"What is {n}? ", "completion": f"It is {n}."} for n in range(12)]
DATA = "".join(json.dumps(line) + "\n" for line in LINES).encode()
KEYS = ("--api-key", "one=key-1", "--api-key", "two=key-2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the server may read adapters: two of them."""
    for seed, name in enumerate(("pirate", "poet"), 1):
        peft_model(name, seed=seed)
        shutil.copytree(adapter_root() / name, tmp_path / "adapters" / name)
    return tmp_path / "adapters"


def post(served: Served, what: str, key: str = "key-1", **body: object):
    return served.post(
        f"/v1/{what}_lora_adapter", json=body, headers={"Authorization": f"Bearer {key}"}
    )


def names(client: OpenAI) -> list[str]:
    """Checkpoints, too."""
    return [
        each.id
        for each in client.models.list(extra_query={"checkpoints": True})
        if each.id != "small"
    ]


def answer(client: OpenAI, name: str) -> list[float]:
    done = client.completions.create(
        model=name, prompt="Ahoy", max_tokens=5, temperature=0, logprobs=1
    )
    assert done.choices[0].logprobs is not None
    scores = done.choices[0].logprobs.token_logprobs
    assert scores is not None
    return scores


def from_peft(name: str, seed: int) -> list[float]:
    return expected(list(tokenizer()("Ahoy")["input_ids"]), 5, peft_model(name, seed=seed))[1]


def kill(served: Served) -> None:
    """Both processes, at once."""
    engine = served.engine_pid()
    served.process.kill()
    served.process.wait()
    served.wait_until(lambda: not is_alive(engine))


def test_what_is_loaded_is_there_after_restarts_of_each_tenant_its_own(root: Path):
    home = Path(mkdtemp(prefix="coserve-home-"))
    options = ("--allow-adapter-paths", str(root), *KEYS)
    with serving(*options, home=home) as served:
        for key, name, directory in (
            ("key-1", "mine", "pirate"),
            ("key-1", "gone", "pirate"),
            ("key-2", "mine", "poet"),
        ):
            loaded = post(served, "load", key, lora_name=name, lora_path=str(root / directory))
            assert loaded.status_code == 200, loaded.text
        assert post(served, "unload", lora_name="gone").status_code == 200
        first = served.client("key-1").models.retrieve("mine")
        kill(served)
    with serving(*options, home=home) as served:
        one, two = served.client("key-1"), served.client("key-2")
        assert (names(one), names(two)) == (["mine"], ["mine"])
        assert one.models.retrieve("mine") == first
        assert answer(one, "mine") == pytest.approx(from_peft("pirate", 1), abs=1e-4)
        assert answer(two, "mine") == pytest.approx(from_peft("poet", 2), abs=1e-4)
        again = post(served, "load", lora_name="mine", lora_path=str(root / "poet"))
        assert again.status_code == 400, "it is there"
        again = post(
            served, "load", lora_name="mine", lora_path=str(root / "poet"), load_inplace=True
        )
        assert again.status_code == 200, again.text
        assert post(served, "unload", "key-2", lora_name="mine").status_code == 200
    with serving(*options, home=home) as served:
        one, two = served.client("key-1"), served.client("key-2")
        assert (names(one), names(two)) == (["mine"], [])
        assert answer(one, "mine") == pytest.approx(from_peft("poet", 2), abs=1e-4)
        assert post(served, "unload", "key-2", lora_name="mine").status_code == 404


@pytest.mark.long
def test_one_that_cannot_be_read_any_more_is_told_and_not_served(root: Path):
    home = Path(mkdtemp(prefix="coserve-home-"))
    with serving("--allow-adapter-paths", str(root), home=home) as served:
        for name in ("pirate", "poet"):
            assert (
                post(served, "load", lora_name=name, lora_path=str(root / name)).status_code == 200
            )
    (root / "pirate").rename(root / "elsewhere")
    with serving("--allow-adapter-paths", str(root), home=home) as served:
        client = served.client()
        assert names(client) == ["poet"]
        assert (
            f"the adapter 'pirate' of 'default' is not served: {root / 'pirate'} has no"
            in served.log.read_text()
        )
        with pytest.raises(openai.NotFoundError):
            answer(client, "pirate")
        with pytest.raises(openai.BadRequestError, match="cannot be deleted"):
            client.models.delete("pirate")
    (root / "elsewhere").rename(root / "pirate")
    with serving("--allow-adapter-paths", str(root), home=home) as served:
        assert names(served.client()) == ["pirate", "poet"], "a disk that came late loses nothing"
        assert answer(served.client(), "pirate") == pytest.approx(from_peft("pirate", 1), abs=1e-4)
    other = root.parent / "other"
    other.mkdir()
    with serving("--allow-adapter-paths", str(other), home=home) as served:
        assert names(served.client()) == [], "what may not be read now is not"
        assert "is not below --allow-adapter-paths any more" in served.log.read_text()
        assert post(served, "unload", lora_name="pirate").status_code == 200
        assert post(served, "unload", lora_name="pirate").status_code == 404
    with serving("--allow-adapter-paths", str(root), home=home) as served:
        assert names(served.client()) == ["poet"], "what was unloaded is forgotten"


# -- models that jobs have made ------------------------------------------------------------


def finished(served: Served, client: OpenAI):
    """A job with checkpoints after steps 4 and 8, and its model."""
    adapter = {"type": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj"]}
    job = client.fine_tuning.jobs.create(
        model="small",
        training_file=client.files.create(file=("data.jsonl", DATA), purpose="fine-tune").id,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 3}},
        },
        extra_body={"coserve": {"adapter": adapter, "checkpoint_every_steps": 4}},
    )

    def over():
        found = client.fine_tuning.jobs.retrieve(job.id)
        return found if found.status in ("succeeded", "failed", "cancelled") else None

    done = served.wait_until(over, limit_s=120)
    assert done.status == "succeeded", done
    return done


def checkpoints(client: OpenAI, job) -> list[str]:
    return [
        each.fine_tuned_model_checkpoint
        for each in client.fine_tuning.jobs.checkpoints.list(job.id)
    ]


def test_a_deleted_model_takes_its_checkpoints_along():
    home = Path(mkdtemp(prefix="coserve-home-"))
    with serving(home=home) as served:
        client = served.client()
        job, kept = finished(served, client), finished(served, client)
        late, early = checkpoints(client, job)
        folder = home / "jobs" / job.id
        assert answer(client, late) == pytest.approx(answer(client, job.fine_tuned_model), abs=1e-5)
        assert answer(client, early)
        assert client.models.delete(early).deleted, "a checkpoint alone"
        assert checkpoints(client, job) == [late]
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-8"]
        assert client.models.delete(job.fine_tuned_model).deleted
        kept_names = [kept.fine_tuned_model, *checkpoints(client, kept)]
        gone = [job.fine_tuned_model, late, early]
    with serving(home=home) as served:
        client = served.client()
        assert checkpoints(client, job) == []
        assert not folder.exists()
        assert sorted(names(client)) == sorted(kept_names)
        assert all(answer(client, name) for name in kept_names)
        for name in gone:
            with pytest.raises(openai.NotFoundError):
                answer(client, name)
            with pytest.raises(openai.NotFoundError):
                client.models.delete(name)
        assert client.fine_tuning.jobs.retrieve(job.id).status == "succeeded", (
            "the job itself stays on record"
        )


def test_a_model_whose_files_were_left_when_the_server_was_killed_goes_at_the_next_start():
    home = Path(mkdtemp(prefix="coserve-home-"))
    with serving(home=home) as served:
        client = served.client()
        job = finished(served, client)
        folder = home / "jobs" / job.id
        # A job's examples go shortly after its end.
        shutil.copytree(folder, home / "copy", ignore=shutil.ignore_patterns("examples.msgpack"))
        assert client.models.delete(job.fine_tuned_model).deleted
        kill(served)
    (home / "copy").rename(folder)  # as if it had been killed between the record and the files
    with serving(home=home) as served:
        assert names(served.client()) == []
        assert list((folder / "checkpoints").iterdir()) == []


# -- paths that are none -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("x" * 5000, 400, "characters; 4096 are allowed"),
        ("x" * 300, 400, "'lora_path' cannot be read: File name too long"),
        ("y/" * 1000 + "y", 404, "No adapter found"),
        ("pirate/adapter_config.json", 400, "'lora_path' is a file: give the directory"),
        ("pirate/adapter_config.json/more", 400, "'lora_path' cannot be read: Not a directory"),
        ("circle", 400, "'lora_path'"),
        ("circle/more", 400, "'lora_path'"),
        ("folders", 400, "has no adapter_config.json"),
        ("half", 400, "has no adapter_model.safetensors"),
        ("pipe", 400, "has no adapter_config.json"),
        ("none", 404, "No adapter found"),
        ("pirate\0", 400, "contains an invalid character"),
        ("\ud800", 400, "contains an invalid character"),
    ],
)
def test_paths_that_cannot_be_are_refused_at_once(
    served: Served, path: str, status: int, said: str
):
    peft_model()
    root = adapter_root()
    if not (root / "circle").is_symlink():
        (root / "circle").symlink_to(root / "circle")
        (root / "folders" / "adapter_config.json").mkdir(parents=True)
        (root / "half").mkdir()
        shutil.copy(root / "pirate" / "adapter_config.json", root / "half")
        (root / "pipe").mkdir()
        os.mkfifo(root / "pipe" / "adapter_config.json")
    body = json.dumps({"lora_name": "x", "lora_path": f"{root}/{path}"})
    found = served.post(
        "/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"}
    )
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert error["param"] == "lora_path"
    assert said in error["message"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_directory_that_is_closed_is_refused(served: Served):
    closed = adapter_root() / "closed"
    (closed / "inside").mkdir(parents=True, exist_ok=True)
    closed.chmod(0)
    try:
        for path in (closed, closed / "inside"):
            found = served.post(
                "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(path)}
            )
            assert found.status_code == 400, found.text
            assert "Permission denied" in found.json()["error"]["message"]
    finally:
        closed.chmod(0o755)


@pytest.mark.parametrize("name", ["x" * 257, "a@3", "small", "a\0"])
def test_names_that_cannot_be_are_refused(served: Served, name: str):
    found = served.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter_root())}
    )
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "lora_name"
