"""Processes that start a server do not import what only other programs need."""

import subprocess
import sys

import pytest

from coserve.models.families import families

_HEAVY = {
    *(
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "sympy",
        "transformers.modeling_utils",
    ),
    *("transformers.activations", "pyarrow", "wandb", "ray", "matplotlib", "scipy", "anthropic"),
}
_SHOW = f"import sys; print(sorted({_HEAVY} & set(sys.modules)))"


def _run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_server_and_its_engine_import_nothing_heavy_before_they_serve():
    code = f"""
import coserve.server.serve
from coserve.engine.prompts import load_tokenizer
from coserve.models.source import find_model
from coserve.engine_client.fork_server import import_for_engines

import_for_engines("tiny")
load_tokenizer(find_model("tiny"))
{_SHOW}
"""
    assert _run(code) == "[]"


def test_no_family_needs_them():
    code = f"""
from coserve.models.fast_imports import import_configurations

import_configurations()
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

for family in {families()}:
    CONFIG_MAPPING[family]
{_SHOW}
"""
    assert _run(code) == "[]"


def test_an_optimizer_step_imports_nothing_heavy():
    code = f"""
import torch
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.optimizer import AdapterOptimizer

AdapterOptimizer({{"a": torch.ones(2)}}, OptimizerConfig()).step({{"a": torch.ones(2)}}, num_trained=1, num_steps=1)
{_SHOW}
"""
    assert _run(code) == "[]"


@pytest.mark.parametrize("name", ["silu", "no-such"])
def test_validators_still_know_the_activation_functions(name: str):
    code = f"""
import sys
from coserve.models.fast_imports import import_configurations

import_configurations()
from transformers.utils import type_validators

assert "transformers.activations" not in sys.modules
known = type_validators.ACT2FN
assert ({name!r} in known) == ({name!r} == "silu") and len(known) == len(list(known)) > 10
from transformers.activations import ACT2FN, SiLUActivation

assert list(ACT2FN) == list(known) and isinstance(known["silu"], SiLUActivation)
print("same")
"""
    assert _run(code) == "same"
