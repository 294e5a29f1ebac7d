"""A CPU that is divided: the forward pass beside losses and tasklets, each on threads of its
own."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import Driver
from engines import examples_of, expected_tokens, greedy, prompts_of
from recordings import steps_in
from support import make_backbone, random_sequences, random_tokens

import coserve.devices.torch.step as torch_step
from coserve import models
from coserve.adapters import LoraConfig
from coserve.devices.base import Device
from coserve.devices.loading import torch_device as make_device
from coserve.devices.messages.steps import (
    LossRows,
    RequestRows,
    StepResult,
    Tasklets,
    Update,
    WindowRows,
)
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import record
from coserve.engine.replay import replay
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.scheduling import Partition
from coserve.scheduling.sharing import Share, Sharing
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

FAST = Hardware(name="fast", flops_per_s=1e14, bytes_per_s=1e14, call_s=1e-8)
SEQUENCES = random_sequences((9, 14, 6))
NUM_ROWS = 29
NUM_TRAINED = sum(sum(trained[1:]) for _, trained in SEQUENCES)
LORA = LoraConfig(r=4, alpha=8, target_modules="all-linear").to_peft()
CONFIG = TuningConfig(seed=3, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-6))
HALVES = Partition(1, 1)
PROMPT = tuple(random_tokens(11, 0).tolist())
MOST_S = 60.0


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "as before each step"
    torch.set_num_threads(before)


def make_driver(*, deterministic: bool = False) -> Driver:
    backbone = make_backbone("llama")
    memory_bytes, profile = 3000 * kv_page_bytes(backbone, 4), roofline_profile(backbone, FAST)
    made = make_device(
        backbone,
        memory_bytes=memory_bytes,
        block_tokens=4,
        profile=profile,
        deterministic=deterministic,
    )
    return Driver(made)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = make_driver()
    yield made
    made.device.close()


def ready(driver: Driver, *jobs: str) -> None:
    """Packs up to their losses, and a request."""
    for job in jobs:
        opened = driver.open_trainer(job, CONFIG, adapter=LORA)
        driver.begin(job, opened, SEQUENCES)
        driver.step(windows=[WindowRows(job, NUM_ROWS)])
    driver.open("r", greedy(1))


def rows(driver: Driver) -> list[RequestRows]:
    return [RequestRows("r", 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True)]


def ends_after(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], bool]) -> None:
    """Have the forward pass wait in its middle for the other side."""
    real = models.forward

    def forward(*given: Any) -> torch.Tensor:
        hidden, until_s = real(*given), time.monotonic() + MOST_S
        while not condition() and time.monotonic() < until_s:
            time.sleep(1e-4)
        assert condition(), "the other side did not get on"
        return hidden

    monkeypatch.setattr(torch_step, "forward", forward)


def norm_after(driver: Driver, result: StepResult, job: str) -> tuple[float, float | None]:
    """Return the loss of a pack that is done, and the norm of its gradients."""
    return result.packs[job].loss, driver.step(updates=[Update(job, NUM_TRAINED, 1)]).norms[job]


def test_its_units_are_threads_unless_results_must_not_depend_on_them():
    assert make_driver().device.info.num_units == 2
    assert make_driver(deterministic=True).device.info.num_units == 1
    torch.set_num_threads(1)
    assert make_driver().device.info.num_units == 1
    torch.set_num_threads(2)


def test_answers_and_gradients_are_those_of_a_step_in_turns(driver, monkeypatch):
    ready(driver, "turns", "sides")
    work = {
        name: {"losses": [LossRows(name, NUM_TRAINED)], "tasklets": [Tasklets(name, 10, 9)]}
        for name in ("turns", "sides")
    }
    turns = driver.step(**work["turns"])
    assert turns.beside_s == 0 and not turns.num_beside
    passes = driver.device._trainers["sides"].training_pass
    ends_after(monkeypatch, lambda: passes.done)
    sides = driver.step(requests=rows(driver), partition=HALVES, **work["sides"])
    assert (sides.tokens["r"].token,) == expected_tokens(PROMPT, 1)
    assert sides.num_tasklets == sides.num_beside == {"sides": 9}
    assert (
        sides.forward_s > 0
        and sides.beside_s > 0
        and sides.loss_s < 1e-3
        and sides.backward_s < 1e-3
    )
    monkeypatch.undo()
    expected = norm_after(driver, turns, "turns")
    assert norm_after(driver, sides, "sides") == pytest.approx(expected, rel=1e-5)


def test_what_is_left_when_the_forward_pass_ends_runs_on_all_threads_or_waits(driver, monkeypatch):
    ready(driver, "job", "other")
    driver.step(losses=[LossRows("job", NUM_TRAINED), LossRows("other", NUM_TRAINED)])
    passes = driver.device._trainers["job"].training_pass
    tasklets = [Tasklets("job", 1000, 3)]
    ends_after(monkeypatch, lambda: passes.num_parts_done >= 1)
    stopped = driver.step(
        requests=rows(driver), tasklets=tasklets, partition=Partition(1, 1, stops=True)
    )
    assert 1 <= stopped.num_tasklets["job"] <= 3 and stopped.num_beside == stopped.num_tasklets
    other = driver.device._trainers["other"].training_pass
    ends_after(monkeypatch, lambda: other.num_parts_done >= 1)
    driver.open("r", greedy(1))
    left = driver.step(
        requests=rows(driver), tasklets=[Tasklets("other", 1000, 3)], partition=HALVES
    )
    assert left.num_tasklets == {"other": 3} and left.packs.keys() == {"other"}
    assert left.num_beside["other"] >= 1
    assert len(left.tokens) == 1


def test_the_first_tasklet_runs_however_short_the_forward_pass_is_and_others_until_the_limit(
    driver, monkeypatch
):
    ready(driver, "job")
    driver.step(losses=[LossRows("job", NUM_TRAINED)])
    passes = driver.device._trainers["job"].training_pass
    for partition in (HALVES, Partition(1, 1, stops=True)):
        driver.open("r", greedy(1))
        found = driver.step(
            requests=rows(driver),
            tasklets=[Tasklets("job", 10, 3)],
            partition=partition,
            backward_limit_s=0.0,
        )
        assert found.num_tasklets == {"job": 1}
    assert passes.cursor.num_backward_rows == NUM_ROWS - 20, "rows that are left"


@pytest.mark.parametrize("side", ["forward", "run_losses", "both"])
def test_running_out_of_memory_on_either_side_is_a_result(driver, monkeypatch, side):
    ready(driver, "job")

    def fail(*given: Any) -> None:
        raise MemoryError(f"no memory for {side}")

    for name in ("forward", "run_losses") if side == "both" else (side,):
        monkeypatch.setattr(torch_step, name, fail)
    work: dict[str, Any] = {
        "losses": [LossRows("job", NUM_TRAINED)],
        "tasklets": [Tasklets("job", 10, 9)],
    }
    failed = driver.try_step(requests=rows(driver), partition=HALVES, **work)
    assert failed.failure is not None and f"no memory for {side}" in failed.failure.message
    monkeypatch.undo()
    opened = driver.open_trainer("again", CONFIG, adapter=LORA)
    assert driver.train("again", opened, SEQUENCES).packs, "it works as before"


@pytest.mark.parametrize("side", ["forward", "run_losses"])
def test_any_other_error_of_either_side_is_raised_when_the_step_is_collected(
    driver, monkeypatch, side
):
    ready(driver, "job")

    def fail(*given: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(torch_step, side, fail)
    with pytest.raises(RuntimeError, match="a defect"):
        driver.step(requests=rows(driver), losses=[LossRows("job", NUM_TRAINED)], partition=HALVES)


def test_more_units_than_there_are_are_refused(driver):
    ready(driver, "job")
    with pytest.raises(AssertionError, match="not as many units"):
        driver.step(requests=rows(driver), losses=[LossRows("job", 9)], partition=Partition(2, 1))


# -- the engine -----------------------------------------------------------------------


@pytest.mark.long
def test_a_recorded_run_of_a_divided_device_is_run_again_divided_or_not(tmp_path):
    backbone, here = (
        make_backbone("llama"),
        Hardware(name="here", flops_per_s=1e12, bytes_per_s=1e12, call_s=1e-4),
    )
    share = Share(units=1, rows=(1,), forward=(0.95,), backward=(0.95,))
    profile = replace(
        roofline_profile(backbone, here), sharing=Sharing(num_units=2, shares=(share,))
    )

    def device() -> Device:
        return make_device(
            backbone,
            memory_bytes=3000 * kv_page_bytes(backbone, 4),
            block_tokens=4,
            profile=profile,
        )

    config = EngineConfig(policy="spatial-sharing", block_tokens=4, tpot_s=1.0, ttft_s=4.0)
    engine = record(Engine(device(), config), str(tmp_path / "file"))
    adapter = LoraConfig(r=4, target_modules="all-linear")
    engine.submit(examples_of([40] * 4), TuningConfig(num_epochs=2, batch_size=2), adapter=adapter)
    engine.add(prompts_of((9,))[0], greedy(100))
    while engine.has_work:
        engine.step()
    engine.device.close()
    header, read = read_recording(tmp_path / "file")
    lines = list(read)
    assert any(batch.partition is not None for batch in steps_in(lines))
    for threads in (2, 1):
        torch.set_num_threads(threads)
        report = replay(header, iter(lines), device())
        torch.set_num_threads(2)
        assert report.plans_equal and report.tokens_equal, report.diverged
        assert report.max_loss_difference < 1e-5
