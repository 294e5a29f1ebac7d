"""Blocks that run as one call give what they give one by one, to the last bit, in any company."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from support import CONFIGS, make_adapter, make_backbone, random_tokens, random_weights_
from transformers import AutoConfig, AutoModelForCausalLM

from coserve.kernels.cpu import CpuBackend
from coserve.memory.paged_kv import PagedKv
from coserve.models import Backbone, forward, load_backbone

pytestmark = pytest.mark.skipif(not CpuBackend.is_available(torch.device("cpu")), reason="needs compiled kernels")

BLOCK = 4
# Whole tiles, where there is AMX.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MODELS = [
    ("qwen3", "float32", "int8"),
    ("llama-biases-tied", "float32", "int8"),
    ("qwen3", "bfloat16", "int8"),
    *(
        (name, "bfloat16", weights)
        for name in ("llama", "qwen2-sliding", "qwen3", "llama-biases-tied")
        for weights in ("dense", "int8")
    ),
]


@cache
def wide_directory(name: str) -> Path:
    config = AutoConfig.for_model(**{**CONFIGS[name], **WIDE})
    directory = Path(mkdtemp(prefix="coserve-wide-"))
    model: Any = random_weights_(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(directory)
    return directory


def backbone_of(name: str, dtype: str, weights: str) -> Backbone:
    return load_backbone(str(wide_directory(name)), dtype=dtype, weights=weights)


class Steps:
    """Sequences in pages, and steps in which each of them decodes."""

    def __init__(self, backbone: Backbone, lengths=(5, 1, 7, 12, 3)):
        self.pages = PagedKv(backbone, num_pages=10 * len(lengths), block_tokens=BLOCK)
        self.pages.pages.fill_(torch.nan)
        self.lengths = list(lengths)
        for index, length in enumerate(lengths):
            forward(backbone, [self.pages.rows([(self.table(index), 0, random_tokens(length, index).tolist())])])

    def table(self, index: int) -> list[int]:
        return [10 * index + page for page in (3, 0, 7, 1, 9, 2)]

    def step(self, bypasses=None, which=None) -> torch.Tensor:
        """The next row of each, or of some."""
        which = range(len(self.lengths)) if which is None else which
        spans = []
        for index in which:
            own = None if bypasses is None else bypasses[index]
            rows = [(self.table(index), self.lengths[index], [(7 * self.lengths[index] + index) % 90])]
            spans.append(self.pages.rows(rows, own))
            self.lengths[index] += 1
        return forward(self.pages.backbone, spans)

    @property
    def num_traces(self) -> int:
        return sum(calls is not None for calls in self.pages.stores.traces.values())


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "trace", lambda self, dtype: None)


@pytest.mark.parametrize(("name", "dtype", "weights"), MODELS)
def test_steps_of_requests_are_equal_to_the_last_bit(name, dtype, weights, monkeypatch):
    backbone = backbone_of(name, dtype, weights)
    few = [None, [4, 2], None, [0], [3, 1, 0], None]
    traced = Steps(backbone)
    ours = [traced.step(which=which) for which in few]
    assert traced.num_traces == 1
    one_by_one(monkeypatch)
    plain = Steps(backbone)
    theirs = [plain.step(which=which) for which in few]
    assert not plain.num_traces
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(traced.pages.storage, plain.pages.storage), "keys and values, too"


@pytest.mark.parametrize(("name", "dtype", "weights"), MODELS)
def test_with_adapters_at_all_or_some_linear_layers(name, dtype, weights, monkeypatch):
    backbone = backbone_of(name, dtype, weights)
    targets = [["q_proj", "v_proj"], "all-linear", ["down_proj"]]
    adapters = [
        make_adapter(backbone, seed=seed, r=rank, target_modules=target)
        for seed, rank, target in zip((1, 2, 3), (4, 8, 2), targets, strict=True)
    ]
    first, second, third = [adapter.bypasses() for adapter in adapters]
    companies = [[None, first, None, first, first], [first, second, None, second, first], [third] * 5]

    def run(steps: Steps) -> list[torch.Tensor]:
        found = [steps.step(company) for company in companies for _ in range(2)]
        for adapter in adapters:  # values change where they lie, as after an optimizer step
            for master in adapter.masters.values():
                master.mul_(-2)
            adapter.sync_compute_copy()
        found += [steps.step(company) for company in companies]
        for adapter in adapters:
            for master in adapter.masters.values():
                master.mul_(-0.5)
            adapter.sync_compute_copy()
        return found

    traced = Steps(backbone)
    ours = run(traced)
    assert sum(places > 0 and calls is not None for places, calls in traced.pages.stores.traces.items()) == len(
        companies
    )
    one_by_one(monkeypatch)
    for one, other in zip(ours, run(Steps(backbone)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_rows", [1, 32, 33, 100])
def test_any_number_of_rows(num_rows, monkeypatch):
    """More than the kernels are for run one by one."""
    backbone = backbone_of("qwen3", "float32", "int8")
    lengths = [index % 9 + 1 for index in range(num_rows)]
    ours = Steps(backbone, lengths).step()
    one_by_one(monkeypatch)
    assert torch.equal(ours, Steps(backbone, lengths).step())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("opt", "float32"), ("llama", "float32"), ("gemma2", "float32"), ("gpt-oss", "float32"), ("qwen3", "float16")],
)
def test_what_cannot_be_traced_runs_one_by_one(name, dtype):
    """Operators, widths or dtypes that no kernel is for."""
    steps = Steps(make_backbone(name, dtype))
    assert steps.step().isfinite().all()
    assert not steps.num_traces


def test_steps_with_a_prompt_run_one_by_one():
    steps = Steps(backbone_of("qwen3", "float32", "int8"), lengths=(5, 2))
    prompt = steps.pages.rows([(steps.table(0), 5, random_tokens(3, 8).tolist())])
    forward(steps.pages.backbone, [prompt, steps.pages.rows([(steps.table(1), 2, [9])])])
    assert not steps.num_traces
