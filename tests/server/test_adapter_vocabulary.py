"""Adapters with tokens of their own, over HTTP: PEFT's directory with the tokenizer that it was
trained with."""

import copy
import shutil
from pathlib import Path

import openai
import pytest
import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from served import adapter_root, model, model_directory, serving, tokenizer
from tokenizers import AddedToken

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
NEW = ["<|tone|>", "<|calm|>", "<|loud|>"]


@pytest.fixture(scope="module")
def made() -> tuple[object, Path]:
    """PEFT's model, and where it is with its tokenizer."""
    directory, own = adapter_root() / "toned", copy.deepcopy(tokenizer())
    own.add_tokens([AddedToken(text, special=True, normalized=False) for text in NEW])
    base = copy.deepcopy(model())
    base.name_or_path = str(model_directory())
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2)
        base.resize_token_embeddings(len(own), mean_resizing=False)
        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"]
        )
        theirs = get_peft_model(base, config).eval()
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(directory)
    own.save_pretrained(directory)
    return theirs, directory


def greedy(theirs, tokens: list[int], number: int) -> list[int]:
    for _ in range(number):
        with torch.no_grad():
            tokens = [*tokens, int(theirs(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-number:]


@pytest.mark.long
def test_an_adapter_with_tokens_of_its_own_answers_as_peft_does(made):
    theirs, directory = made
    known = tokenizer().convert_tokens_to_ids
    size = len(tokenizer())
    prompt = [*tokenizer()("Hello ", add_special_tokens=False)["input_ids"], size, size + 2]
    expected = greedy(theirs, prompt, 8)
    options = ("--lora-modules", f"given={directory}", "--allow-adapter-paths", str(adapter_root()))
    with serving(*options) as served:
        client: OpenAI = served.client()
        answer = served.post(
            "/v1/load_lora_adapter", json={"lora_name": "toned", "lora_path": str(directory)}
        )
        assert answer.status_code == 200, answer.text
        for name in ("toned", "given"):
            for given in ("Hello <|tone|><|loud|>", prompt):
                found = client.completions.create(
                    model=name,
                    prompt=given,
                    max_tokens=8,
                    temperature=0,
                    extra_body={"return_token_ids": True},
                )
                assert found.choices[0].model_extra["token_ids"] == expected
                assert found.usage.prompt_tokens == len(prompt)
        asked = served.post("/tokenize", json={"model": "toned", "prompt": "<|calm|>"})
        assert asked.json()["tokens"] == [size + 1]
        with pytest.raises(
            openai.BadRequestError, match=f"token {size + 1} .* the model has {size} tokens"
        ):
            client.completions.create(model="small", prompt=[1, size + 1], max_tokens=1)
        assert known(NEW[0]) != size, "the base knows none of them"
        base = client.completions.create(model="small", prompt="Hello <|tone|>", max_tokens=1)
        assert base.usage.prompt_tokens > 3
    shutil.rmtree(directory)
