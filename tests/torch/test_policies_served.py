"""Every policy, whatever it decides: the right answers, each example once, and the same adapter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import (
    FAST,
    assert_nothing_is_held,
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
)
from safetensors.torch import load_file

from coserve.adapters import LoraConfig
from coserve.devices.messages.jobs import BeginPack
from coserve.scheduling.policies import policy_names
from coserve.tuning.config import OptimizerConfig, TuningConfig

LORA = LoraConfig(r=3, alpha=6, target_modules="all-linear", dropout=0.2)
CONFIG = TuningConfig(
    num_epochs=2,
    batch_size=3,
    max_pack_tokens=40,
    seed=4,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
LENGTHS = (9, 34, 5, 40, 11, 27, 3)
# Settings with which a short test reaches what they set.
SETTINGS: dict[str, dict[str, Any]] = {
    "temporal-sharing": {"n": 3},
    "chunked-training": {"chunk_tokens": 16},
}


def saved(engine, directory):
    engine.save_adapter("mine", directory)
    return load_file(directory / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The adapter of a job that had the engine for itself."""
    engine = make_engine()
    engine.tune(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")
    return saved(engine, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("policy", policy_names())
def test_answers_and_adapters_are_the_same_under_every_policy(policy, undisturbed, tmp_path):
    """Waves of requests while a job runs, on a pool that holds either well, and both hardly."""
    serve_and_tune(policy, undisturbed, tmp_path)


@pytest.mark.parametrize("policy", ["harli", "slack", "spatial-sharing"])
def test_they_are_the_same_on_a_divided_device(policy, undisturbed, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = serve_and_tune(
            policy, undisturbed, tmp_path, hardware=replace(FAST, num_units=2, bytes_per_s=1e12)
        )
    finally:
        torch.set_num_threads(before)
    assert any(batch.partition is not None for batch in batches)


def serve_and_tune(policy, undisturbed, tmp_path, **given):
    """The steps of an engine that answers waves of requests and runs a job, all of which was
    checked."""
    settings = SETTINGS.get(policy, {})
    engine = make_engine(
        num_pages=260, policy=policy, policy_settings=settings, ttft_s=1e-3, **given
    )
    job = engine.job(engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine"))
    device, asked, used = watched(engine), {}, []
    events: list[Any] = []
    tunes, serves = policy != "inference-only", policy != "tuning-only"
    for step in range(5000):
        if serves and step < 100 and step % 10 == 0:
            for prompt in prompts_of((5, 20, 33), step):
                asked[engine.add(prompt, greedy(9))] = prompt
        if (job.is_terminal or not tunes) and not engine.has_requests:
            break
        events += engine.step()
        engine.check_integrity()
        if device.results and job.id in device.results.pop().packs:
            begun = [command for command in device.commands if isinstance(command, BeginPack)]
            used += [tokens for tokens, _ in begun[-1].sequences]
    events += drain(engine)
    assert tokens_by_request(events) == {
        name: expected_tokens(prompt, 9) for name, prompt in asked.items()
    }
    if tunes:
        assert job.state == "succeeded"
        every = [list(example.tokens) for example in examples_of(LENGTHS)]
        assert sorted(map(list, used)) == sorted(2 * every), "each example once in every epoch"
        found = saved(engine, tmp_path)
        assert found.keys() == undisturbed.keys()
        assert max(float((found[name] - undisturbed[name]).abs().max()) for name in found) < 1e-5
        assert_nothing_is_held(engine)
    else:
        assert job.num_rows_run == 0
    device.close()
    return device.batches
