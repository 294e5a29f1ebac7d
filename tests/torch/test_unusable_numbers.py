"""Adapters and checkpoints whose numbers are NaN or infinite are refused when they are loaded, by
file and tensor."""

import shutil
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import adapter_directory, examples_of, greedy, make_engine, prompts_of
from peft_methods import CASES, peft_directory
from safetensors.torch import load_file, save_file
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.adapters.peft_directory import load_adapter
from coserve.errors import AdapterError
from coserve.server.adapters.catalogue import GivenAdapters
from coserve.tuning.config import OptimizerConfig, TuningConfig

UNUSABLE = ((nan, "numbers that are NaN"), (inf, "infinite numbers"), (-inf, "infinite numbers"))
WEIGHTS = "adapter_model.safetensors"


def spoil(path: Path, value: float, *, dtype: torch.dtype | None = None, ends: str = "") -> str:
    """Give one number of a file's last tensor another value; return the tensor's name."""
    tensors = load_file(path)
    name = max(name for name in tensors if name.endswith(ends) and tensors[name].ndim)
    changed = tensors[name].clone() if dtype is None else tensors[name].to(dtype)
    changed.view(-1)[-1] = value
    save_file({**tensors, name: changed}, path, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(("value", "said"), UNUSABLE)
def test_an_engine_refuses_the_adapter_on_every_way_to_it(value, said):
    directory = adapter_directory(r=3)
    name = spoil(Path(directory) / WEIGHTS, value)
    message = rf"{WEIGHTS}: {name} has {said}"
    engine = make_engine()
    with pytest.raises(AdapterError, match=message):
        engine.load_adapter("mine", directory)
    with pytest.raises(AdapterError, match=message):
        engine.ensure_adapter("mine", directory)
    load = engine.begin_load("mine", directory)
    assert load is not None
    with pytest.raises(AdapterError, match=message):
        load.read()
    with pytest.raises(AdapterError, match=message):
        GivenAdapters([f"mine={directory}"], base="small", taken=())
    assert "mine" not in engine.versions
    engine.load_adapter("mine", adapter_directory(r=3))
    engine.add_tokens(prompts_of((5,))[0], greedy(2), adapter="mine")
    while engine.has_work:
        engine.step()


@pytest.mark.filterwarnings("ignore:.*invalid shape")
@pytest.mark.parametrize(
    "method", sorted(name for name, case in CASES.items() if case.peft is not None)
)
def test_adapters_of_every_method_are_refused(method, tmp_path):
    family = CASES[method].families[0]
    shutil.copytree(peft_directory(method, family), tmp_path, dirs_exist_ok=True)
    load_adapter(make_backbone(family), tmp_path)
    name = spoil(tmp_path / WEIGHTS, nan)
    with pytest.raises(AdapterError, match=f"{name} has numbers that are NaN"):
        load_adapter(make_backbone(family), tmp_path)


@pytest.mark.parametrize(
    ("dtype", "stored", "value"),
    [
        ("float16", torch.float32, 1e5),
        ("bfloat16", torch.float64, 1e100),
        ("float32", torch.float64, 1e39),
    ],
)
def test_numbers_that_are_infinite_as_the_model_computes_are_refused(dtype, stored, value):
    """The largest of float16 is 65,504; of the others, 3.4e38."""
    directory = adapter_directory(r=3)
    name = spoil(Path(directory) / WEIGHTS, value, dtype=stored)
    with pytest.raises(AdapterError, match=f"{name} has "):
        load_adapter(make_backbone("llama", dtype), directory)


@pytest.mark.parametrize("file", [WEIGHTS, "optimizer.safetensors"])
def test_a_job_is_not_resumed_from_them(file, tmp_path):
    engine = make_engine()
    data: dict[str, Any] = {"job_id": "job", "name": "mine"}
    config = TuningConfig(num_epochs=2, batch_size=2, optimizer=OptimizerConfig(learning_rate=1e-2))
    engine.submit_examples(examples_of((9, 14, 5, 11)), config, adapter=LoraConfig(r=3), **data)
    while engine.jobs["job"].num_steps_done < 2:
        engine.step()
    checkpoint = engine.checkpoint("job").write(tmp_path)
    other = make_engine()
    whole = (checkpoint / file).read_bytes()
    name = spoil(checkpoint / file, nan)
    with pytest.raises(AdapterError, match=f"{file}: {name} has numbers that are NaN"):
        other.submit_examples(examples_of((9, 14, 5, 11)), config, checkpoint=checkpoint, **data)
    assert not other.jobs
    (checkpoint / file).write_bytes(whole)
    other.submit_examples(examples_of((9, 14, 5, 11)), config, checkpoint=checkpoint, **data)
