"""What an engine is called with: of another kind it is refused in words, and what users have at
hand is taken."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import examples_of, greedy, make_engine
from peft import LoraConfig as PeftLoraConfig
from safetensors.torch import load_file
from support import model_directory

from coserve import Engine, LoraConfig
from coserve.errors import AdapterError, DataError, ModelError, RequestError
from coserve.tuning.config import TuningConfig

EXAMPLES = examples_of((5, 7))
WRONG_CONFIG: Any = {"policy": "slack"}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda engine: engine.generate(None), RequestError, "generate takes a list of prompts"),
        (
            lambda engine: engine.generate([[1], None]),
            RequestError,
            "a prompt is text, token ids or messages, not None",
        ),
        (
            lambda engine: engine.generate([[1]], adapter=3),
            AdapterError,
            "the name of an adapter must be text, not 3",
        ),
        (lambda engine: engine.add([1], slo=3), RequestError, "slo must be an Slo, not 3"),
        (
            lambda engine: engine.submit(None),
            DataError,
            "data is a file, lines or examples, not None",
        ),
        (
            lambda engine: engine.submit([], {"num_epochs": 1}),
            ValueError,
            "config must be of the class TuningConfig",
        ),
        (
            lambda engine: engine.submit(EXAMPLES, adapter=5),
            AdapterError,
            "an adapter is a configuration.*, not 5",
        ),
        (
            lambda engine: engine.submit(EXAMPLES, name=5),
            AdapterError,
            "5 is not a valid adapter name",
        ),
        (
            lambda _: Engine.load(None),
            ModelError,
            "a model is a directory, or has a name, and None is neither",
        ),
        (
            lambda _: Engine.load("tiny", WRONG_CONFIG),
            ValueError,
            "config must be of the class EngineConfig",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_in_words(call, error, words):
    engine = make_engine()
    with pytest.raises(error, match=words):
        call(engine)
    assert not engine.has_work


def test_a_model_is_loaded_from_a_path_and_an_adapter_made_by_pefts_configuration(
    tmp_path, monkeypatch
):
    """Relative, and by the name of the built-in model, it is the directory all the same."""
    shutil.copytree(model_directory("llama"), tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    engine = Engine.load(Path("tiny"), dtype="float32", device="cpu")
    assert engine.device.info.model == str(tmp_path / "tiny")
    found = []
    for number, adapter in enumerate(
        (
            PeftLoraConfig(r=3, target_modules=["q_proj"]),
            LoraConfig(r=3, target_modules=("q_proj",)),
        )
    ):
        engine.tune(EXAMPLES, TuningConfig(num_epochs=2), adapter=adapter, name=f"{number}")
        found.append(engine.generate([[1, 2, 3]], greedy(8), adapter=f"{number}")[0].tokens)
        engine.save_adapter(f"{number}", tmp_path / f"{number}")
    assert found[0] == found[1]
    first, second = (
        load_file(tmp_path / f"{number}" / "adapter_model.safetensors") for number in (0, 1)
    )
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_lines_that_are_tokens_need_no_tokenizer():
    """And the objective's name may be spelled as commands and OpenAI's API have it."""
    line = {
        "prompt_tokens": [5, 6],
        "completion_tokens": [8, 3],
        "logprobs": [-1.0, -2.0],
        "advantages": 1,
    }
    engine, config = (
        make_engine(),
        TuningConfig(objective="policy_gradient", num_epochs=2, batch_size=2),
    )
    assert config == TuningConfig(objective="policy-gradient", num_epochs=2, batch_size=2)
    assert [each.step for each in engine.tune([line] * 4, config) if each.kind == "step"] == [
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(DataError, match="has no tokenizer"):
        engine.submit([{"prompt": "a", "completion": "b"}])
