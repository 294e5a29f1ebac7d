"""`--chat-template` and `--lora-modules`: what a server was started with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, adapter_root, keys_file, model_directory, peft_model, serving

from coserve.errors import AdapterError, CoserveError
from coserve.server.adapters.catalogue import GivenAdapters
from coserve.server.config import ServerConfig
from coserve.server.options.lora_option import lora_module
from coserve.server.text.prompts import template_of

# It opens a reasoning, and takes tools without showing any known format.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>!{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("template")
    path = directory / "template.jinja"
    path.write_text(TEMPLATE)
    for name, seed in (("pirate", 1), ("second", 2)):
        peft_model(name, seed=seed)
    modules = [
        f"mine={adapter_root() / 'pirate'}",
        json.dumps({"name": "other", "path": str(adapter_root() / "second")}),
    ]
    options = [option for module in modules for option in ("--lora-modules", module)]
    keys = keys_file(directory, "", ann="key-of-ann", bob="key-of-bob")
    options += ["--allow-adapter-paths", str(adapter_root())]
    with serving("--chat-template", str(path), *options, "--api-keys-file", str(keys)) as running:
        yield running


def test_chats_are_written_by_the_template(given: Served):
    headers = {"Authorization": "Bearer key-of-ann"}
    body = {
        "messages": HELLO,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_token_strs": True,
    }
    told = given.post("/tokenize", json=body, headers=headers).json()
    assert "!" in told["token_strs"]


def test_all_tenants_may_ask_for_the_adapters(given: Served):
    texts = set()
    for key in ("key-of-ann", "key-of-bob"):
        client = given.client(key)
        assert {"mine", "other"} <= {model.id for model in client.models.list()}
        for name in ("small", "mine", "other"):
            found = client.completions.create(
                model=name, prompt="The quick", max_tokens=8, temperature=0
            )
            texts.add((name, found.choices[0].text))
    assert len(texts) == len({text for _, text in texts}) == 3


def test_models_are_listed_in_the_order_in_which_they_came(given: Served):
    headers = {"Authorization": "Bearer key-of-ann"}
    body = {"lora_name": "a-later-one", "lora_path": str(adapter_root() / "pirate")}
    assert given.post("/v1/load_lora_adapter", json=body, headers=headers).status_code == 200
    listed = [model.id for model in given.client("key-of-ann").models.list()]
    assert listed == ["small", "mine", "other", "a-later-one"]


def test_structured_output_comes_after_the_reasoning_that_the_prompt_opened(given: Served):
    client: Any = given.client("key-of-ann")
    found = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=200, temperature=0, seed=1, response_format=STRICT
    )
    [choice] = found.choices
    if choice.finish_reason == "stop":
        assert set(json.loads(choice.message.content)) == {"a"}
    else:
        assert not choice.message.content, "it has not come to an end of its reasoning"
    without = client.chat.completions.create(
        model="small",
        messages=HELLO,
        max_tokens=60,
        response_format=STRICT,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert set(json.loads(without.choices[0].message.content)) == {"a"}


def test_what_is_wrong_with_the_options_is_said(tmp_path: Path):
    assert lora_module("a=b=c") == ("a", "b=c")
    for wrong in ("a", "=b", "a=", "{", '{"name": "a"}', '{"name": "a", "path": 1}', "{}"):
        with pytest.raises(ValueError, match="lora_modules"):
            ServerConfig(lora_modules=(wrong,))
    for module, reason in (
        (f"a={tmp_path}", "a: "),
        (f"small={model_directory()}", "taken"),
        ("a@b=c", "an @"),
    ):
        with pytest.raises(AdapterError, match=reason):
            GivenAdapters([module], base="small", taken=("small",))
    assert template_of("{{ x }}") == "{{ x }}"
    with pytest.raises(CoserveError, match="--chat-template"):
        template_of(str(tmp_path / "none"))
