"""Adapters in PEFT's format, loaded while the server runs, as vLLM's clients do."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from served import Served, adapter_root, chat_tokens, expected, peft_model, serving, tokenizer

from coserve.server.adapters.catalogue import adapter_at


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Of these tests alone: they say what all the models are."""
    with serving("--allow-adapter-paths", str(adapter_root())) as running:
        yield running


@pytest.fixture(autouse=True)
def _unload_after(served: Served):
    yield
    for known in served.client().models.list():
        if known.id != "small":
            served.post("/v1/unload_lora_adapter", json={"lora_name": known.id})


def load(served: Served, name: str, **more: object):
    path = str(adapter_root() / "pirate")
    return served.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def test_an_adapter_answers_as_peft_does(served: Served, client: OpenAI):
    tokens, logprobs = expected(chat_tokens("Ahoy"), 10, peft_model())
    assert tokens != expected(chat_tokens("Ahoy"), 10)[0]
    answer = load(served, "pirate")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'pirate' added successfully.",
    )
    messages: Any = [{"role": "user", "content": "Ahoy"}]
    for stream in (False, True):
        if stream:
            events: Any = client.chat.completions.create(
                model="pirate",
                messages=messages,
                max_tokens=10,
                temperature=0,
                logprobs=True,
                stream=True,
            )
            content = [
                each
                for event in events
                for c in event.choices
                if c.logprobs
                for each in c.logprobs.content
            ]
        else:
            whole = client.chat.completions.create(
                model="pirate", messages=messages, max_tokens=10, temperature=0, logprobs=True
            )
            assert whole.choices[0].message.content == tokenizer().decode(
                tokens, skip_special_tokens=True
            )
            content = whole.choices[0].logprobs.content
        assert [each.logprob for each in content] == pytest.approx(logprobs, abs=1e-4)


def test_the_list_of_models_shows_it(served: Served, client: OpenAI):
    peft_model()
    load(served, "pirate")
    base: Any
    adapter: Any
    base, adapter = client.models.list().data
    assert (base.id, base.parent, base.max_model_len) == ("small", None, 512)
    assert (adapter.id, adapter.parent) == ("pirate", "small")
    assert adapter.root == str((adapter_root() / "pirate").resolve())
    assert client.models.retrieve("pirate") == adapter
    answer = served.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'pirate' removed successfully.",
    )
    assert [known.id for known in client.models.list()] == ["small"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="pirate", prompt="x")


def test_a_name_is_taken_once_unless_in_place(served: Served):
    peft_model()
    assert load(served, "pirate").status_code == 200
    again = load(served, "pirate")
    assert again.status_code == 400
    assert again.json()["error"]["message"] == (
        "The lora adapter 'pirate' has already been loaded. If you want to load the adapter in "
        "place, set "
        "'load_inplace' to true."
    )
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert load(served, "pirate", load_inplace=True).status_code == 200
    (adapter_root() / "empty").mkdir(exist_ok=True)
    body = {"lora_name": "pirate", "lora_path": str(adapter_root() / "empty"), "load_inplace": True}
    assert served.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert served.client().completions.create(
        model="pirate", prompt="x", max_tokens=1
    )  # it is still there
    assert load(served, "small").status_code == 400


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_path": "x"}])
def test_both_fields_are_needed(served: Served, body: dict[str, str]):
    answer = served.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Both 'lora_name' and 'lora_path' must be provided."


def test_nothing_is_read_outside_of_what_is_allowed(served: Served, tmp_path: Path):
    peft_model()
    outside = adapter_root() / "way-out"
    if not outside.exists():
        outside.symlink_to(tmp_path)
    for path in (str(tmp_path), "/etc", str(adapter_root() / ".." / ".."), str(outside), os.curdir):
        answer = served.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert answer.status_code == 403, path
    for path, status in ((str(adapter_root() / "none"), 404), ("a\0b", 400)):
        answer = served.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert answer.status_code == status, path


def test_a_directory_without_an_adapter_is_refused(served: Served):
    (adapter_root() / "empty").mkdir(exist_ok=True)
    path = str(adapter_root() / "empty")
    answer = served.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    assert answer.status_code == 400
    assert "adapter_config.json" in answer.json()["error"]["message"]
    assert served.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404


def test_the_engine_never_hears_a_name_twice():
    """Not even of servers one after the other: a job that waits may still mean the adapter of the
    first."""
    first, second = (
        adapter_at(place, tenant="default", name="pirate", base="small").ref
        for place in ("/a", "/b")
    )
    assert first.name != second.name
