"""Checkpoints as the quantisers themselves write them: a model that is loaded from one has the
logits of the weights that its own tool makes of it. benchmarks/quantised-checkpoints.md has what
came of it.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from clients.clients import QUANTISERS, make
from safetensors.torch import load_file

from coserve.errors import UnsupportedModelError
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.weights import weight_tensors

pytestmark = pytest.mark.clients
NAMES = (
    "bitsandbytes-int8",
    "bitsandbytes-nf4",
    "bitsandbytes-nf4-nested",
    "bitsandbytes-fp4",
    "llmcompressor-W4A16",
    "llmcompressor-W4A16_ASYM",
    "llmcompressor-W8A16",
    "llmcompressor-W8A8",
    "llmcompressor-FP8",
    "llmcompressor-FP8_DYNAMIC",
    "llmcompressor-FP8_BLOCK",
    "llmcompressor-GPTQ-W4A16",
    "auto-round-gptq-4",
    "auto-round-gptq-8",
    "auto-round-gptq-asym",
    "auto-round-awq",
    "autoawq",
    "transformers-fp8",
    "transformers-fp8-ue8m0",
    "torchao-mxfp4",
    "gptqmodel",
    "gptqmodel-desc_act",
    "gptqmodel-v2-asym",
)
REFUSED = "torchao"
# GPTQModel asks for two workers of one that it has on two cores, and compiles what is called once.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Where the tools have put them."""
    if not os.environ.get("COSERVE_ALL_CLIENTS"):
        pytest.skip("takes minutes: make test-clients ALL=1")
    if reason := make(QUANTISERS):
        pytest.skip(reason)
    directory: Path = tmp_path_factory.mktemp("quantised")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [*QUANTISERS.command(), str(directory)],
        env=environment | ENVIRONMENT,
        cwd=directory,  # GPTQModel writes a log where it runs
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {*NAMES, REFUSED}
    assert not any("error" in each for each in found.values()), (found, done.stderr[-6000:])
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_gives_the_logits_of_its_own_tool(written: Path, name: str):
    expected = load_file(written / name / "expected.safetensors")
    is_rounded = name.startswith(
        "auto-round"
    )  # which computes in bfloat16: its weights are rounded to that
    backbone = load_backbone(str(written / name), dtype="float32", kernels="plain")
    for held in backbone.weights.values() if is_rounded else ():
        for tensor in weight_tensors(held):
            tensor.copy_(tensor.bfloat16())
    tokens = expected["tokens"]
    ours = logits(
        backbone, forward(backbone, [CachedSequence(backbone, len(tokens)).extend(tokens)])
    )
    worst, largest = (
        float((ours - expected["logits"]).abs().max()),
        float(expected["logits"].abs().max()),
    )
    print(f"{name}: logits of at most {largest:.3g} differ by at most {worst:.1e}")
    assert worst < (2e-3 if is_rounded else 1e-4)


def test_what_torchao_writes_is_refused_by_name(written: Path):
    with pytest.raises(
        UnsupportedModelError, match="weights quantised by torchao are not read; known are awq, "
    ):
        load_backbone(str(written / REFUSED))
