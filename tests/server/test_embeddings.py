"""/v1/embeddings with the real client, held against transformers."""

import math
from typing import Any

import pytest
import torch
from openai import APIStatusError
from served import Served, adapter_root, model, peft_model, tokenizer


@pytest.fixture
def served(either_server: Served) -> Served:
    return either_server


def expected(tokens: list[int], network: Any = None) -> list[float]:
    with torch.inference_mode():
        states = (network or model())(
            torch.tensor([tokens]), output_hidden_states=True
        ).hidden_states[-1]
    vector = states[0, -1].double()
    return list((vector / vector.norm()).tolist())


@pytest.fixture
def client(served: Served) -> Any:
    return served.client()


def test_they_are_the_last_states_of_the_inputs(client: Any):
    texts = ["hello", "The quick brown fox jumps", "hello"]
    ids = [list(tokenizer()(text)["input_ids"]) for text in texts]
    for given in (texts, ids):
        found = client.embeddings.create(model="small", input=given)
        assert [each.index for each in found.data] == [0, 1, 2]
        for each, tokens in zip(found.data, ids, strict=True):
            assert each.embedding == pytest.approx(expected(tokens), abs=1e-5)
            assert math.hypot(*each.embedding) == pytest.approx(1, abs=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    [one] = client.embeddings.create(model="small", input="hello", encoding_format="float").data
    assert one.embedding == pytest.approx(expected(ids[0]), abs=1e-5)


def test_an_adapter_has_its_own(client: Any, served: Served):
    network = peft_model("embedder")
    body = {"lora_name": "embedder", "lora_path": str(adapter_root() / "embedder")}
    assert served.post("/v1/load_lora_adapter", json=body).status_code == 200
    tokens = list(tokenizer()("hello")["input_ids"])
    [one] = client.embeddings.create(model="embedder", input="hello").data
    assert one.embedding == pytest.approx(expected(tokens, network), abs=1e-4)
    assert one.embedding != pytest.approx(expected(tokens), abs=1e-3)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "x " * 5000}, "input"),
        ({"dimensions": 8}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": "none"}, "model"),
        ({"dimension": 8}, "dimension"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_is_wrong_is_named(client: Any, more: dict[str, Any], param: str):
    with pytest.raises(APIStatusError) as raised:
        client.post(
            "/embeddings", body={"model": "small", "input": "hello", **more}, cast_to=object
        )
    assert raised.value.status_code in (400, 404)
    assert raised.value.param == param


def test_a_long_input_is_cut_where_that_is_asked_for(client: Any):
    text = "The quick brown fox jumps"
    tokens = list(tokenizer()(text)["input_ids"])[:3]
    [one] = client.embeddings.create(
        model="small", input=text, extra_body={"truncate_prompt_tokens": 3}
    ).data
    assert one.embedding == pytest.approx(expected(tokens), abs=1e-5)
