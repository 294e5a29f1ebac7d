"""A deterministic engine: what comes of a request or a job is the same bit for bit, whatever runs
beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import adapter_directory, drain, examples_of, greedy, make_engine, prompts_of, watched
from random_plans import random_policy
from safetensors.torch import load_file
from support import random_tokens

from coserve import Engine, LoraConfig, OptimizerConfig, TuningConfig
from coserve.devices.messages.commands import DeviceInfo
from coserve.engine.request import Chunk
from coserve.graph.blocks import in_blocks, split_rows

# All begin alike, in five blocks of four tokens. An adapter is asked of the second half.
PROMPTS = [[*random_tokens(20, 5).tolist(), *own] for own in prompts_of((1, 7, 30, 12))]
everywhere = pytest.mark.parametrize(
    ("dtype", "kernels", "name"),
    [
        ("float32", None, "llama"),
        ("bfloat16", None, "llama"),
        ("float32", "plain", "opt"),
        ("bfloat16", "plain", "qwen2-sliding"),
    ],
)


def deterministic(dtype: str, kernels: str | None, name: str) -> Engine:
    engine = make_engine(name, dtype=dtype, kernels=kernels, deterministic=True)
    engine.load_adapter("helpful", adapter_directory(name))
    return engine


def ask(engine: Engine, index: int) -> None:
    adapter = "helpful" if index >= len(PROMPTS) // 2 else None
    params = greedy(6, logprobs=1, prompt_logprobs=None if index % 3 else 0)
    engine.add(PROMPTS[index], params, adapter=adapter, request_id=str(index))


def answers(engine: Engine) -> tuple[dict[str, list[Any]], int]:
    """Tokens with log-probabilities by request, those of prompts too; and how many tokens were
    cached."""
    found: dict[str, list[Any]] = {}
    num_cached = 0
    for event in drain(engine):
        if isinstance(event, Chunk) and event.request.isdigit():
            lines = (*event.prompt_logprobs, *event.logprobs)
            found.setdefault(event.request, []).extend(
                (each.token, each.logprob, each.top) for each in lines
            )
            num_cached += event.num_cached_tokens if event.finish_reason else 0
    return found, num_cached


def add_company(engine: Engine, seed: int) -> None:
    for index, prompt in enumerate(prompts_of((1, 9, 26), seed)):
        engine.add(
            prompt,
            greedy(5 + index),
            adapter="helpful" if index % 2 else None,
            request_id=f"other-{index}",
        )


def submit(engine: Engine) -> None:
    config = TuningConfig(
        num_epochs=1,
        batch_size=4,
        seed=3,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        evaluate_every_steps=2,
    )
    adapter = LoraConfig(r=4, target_modules="all-linear", dropout=0.1)
    validation = examples_of([11, 34], 9)
    engine.submit(
        examples_of([9, 30, 7, 41, 22, 13]),
        config,
        adapter=adapter,
        name="mine",
        validation=validation,
    )


def trained(engine: Engine, directory: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What comes of the job: its adapter, and what it said about its steps."""
    events = []
    while engine.jobs.num_running or engine.has_requests:
        events += [event for event in engine.step() if not isinstance(event, Chunk)]
        engine.check_integrity()
    engine.save_adapter("mine", directory)
    said = [
        (event.kind, event.step, event.loss, event.norm)
        for event in events
        if event.kind != "pack_dropped"
    ]
    return load_file(directory / "adapter_model.safetensors"), said


@everywhere
def test_answers_do_not_depend_on_cached_prefixes_or_company(dtype, kernels, name):
    expected: dict[str, list[Any]] = {}
    for index in range(len(PROMPTS)):
        alone = deterministic(dtype, kernels, name)
        ask(alone, index)
        found, num_cached = answers(alone)
        assert not num_cached
        expected |= found
    engine = deterministic(dtype, kernels, name)
    submit(engine)
    for seed in (1, 2):  # the second time with cached prefixes, and cut in other ways
        engine.policy = random_policy(seed)
        add_company(engine, seed)
        for index in range(len(PROMPTS)):
            ask(engine, index)
        found, num_cached = answers(engine)
        assert found == expected
    assert num_cached


@everywhere
def test_an_adapter_does_not_depend_on_what_runs_beside_its_job(tmp_path, dtype, kernels, name):
    engine = deterministic(dtype, kernels, name)
    submit(engine)
    expected, said = trained(engine, tmp_path / "alone")
    for seed in (1, 2):
        engine = deterministic(dtype, kernels, name)
        engine.policy = random_policy(seed)
        submit(engine)
        add_company(engine, seed)
        adapter, events = trained(engine, tmp_path / str(seed))
        assert events == said
        assert all(torch.equal(tensor, adapter[key]) for key, tensor in expected.items())


def test_blocks_have_one_shape():
    shapes: list[torch.Size] = []

    def run(inputs):
        shapes.extend(each["x"].shape for each in inputs)
        return [{"y": each["x"] * each["w"]} for each in inputs]

    x, w = torch.arange(14.0).view(7, 2), torch.tensor([2.0, 3.0])
    (one, other) = in_blocks(
        run, [{"x": x, "w": w}, {"x": x[:, :1], "w": w[:1]}], [["x"], ["x"]], 4
    )
    assert torch.equal(one["y"], x * w)
    assert torch.equal(other["y"], x[:, :1] * 2)
    assert set(shapes) == {(4, 2), (4, 1)}
    assert all(part.is_contiguous() for part in split_rows(x[:, 1:], 4))


def test_the_device_says_so():
    info: DeviceInfo = watched(make_engine(deterministic=True)).info
    assert info.deterministic
    assert not watched(make_engine()).info.deterministic
