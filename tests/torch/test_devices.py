"""A device by its messages alone, against transformers and PEFT: in this process, and in another
one."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from devices import Driver
from engines import adapter_directory, expected_tokens, greedy
from safetensors.torch import load_file
from support import (
    exact_gradients,
    make_backbone,
    make_model,
    model_directory,
    random_sequences,
    random_tokens,
    summed_loss,
)
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.adapters import LoraConfig
from coserve.devices.base import Device
from coserve.devices.loading import torch_device
from coserve.devices.messages.commands import (
    CloseRequest,
    CountCommands,
    DescribeRanks,
    DropVersion,
    OpenRequest,
    OpenVersion,
    SaveAdapter,
)
from coserve.devices.messages.jobs import (
    CloseTrainer,
    DropCheckpoint,
    DropPack,
    DropTrainer,
    PublishVersion,
    TakeCheckpoint,
    WriteCheckpoint,
)
from coserve.devices.messages.pages import MovePages
from coserve.devices.messages.steps import (
    LossRows,
    RequestRows,
    StepBatch,
    StepResult,
    Tasklets,
    Update,
    WindowRows,
)
from coserve.devices.process.device import ProcessDevice
from coserve.devices.process.wire import Connection, FromDevice, Started
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.settings import DeviceSettings
from coserve.devices.torch.device import TorchDevice
from coserve.devices.torch.trainer import TorchTrainer
from coserve.errors import AdapterError, DeviceGoneError, UnknownModelError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import Backbone, load_backbone
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.training_pass import TrainingPass

BLOCK, NUM_PAGES = 4, 3000
FAST = Hardware(name="fast", flops_per_s=1e14, bytes_per_s=1e14, call_s=1e-8)
SEQUENCES = random_sequences((9, 14, 6))
NUM_ROWS = 29
NUM_TRAINED = sum(sum(trained[1:]) for _, trained in SEQUENCES)
LORA = LoraConfig(r=4, alpha=8, target_modules="all-linear").to_peft()
CONFIG = TuningConfig(seed=3, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-6))


def make_device(backbone: Backbone | None = None) -> TorchDevice:
    backbone = backbone or make_backbone("llama")
    memory_bytes = NUM_PAGES * kv_page_bytes(backbone, BLOCK)
    return torch_device(
        backbone,
        memory_bytes=memory_bytes,
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, FAST),
    )


def settings(**changed: Any) -> DeviceSettings:
    """Return the settings of the same device, for another process."""
    backbone = make_backbone("llama")
    return DeviceSettings(
        model=str(model_directory("llama")),
        dtype="float32",
        device="cpu",
        threads=1,
        memory_bytes=NUM_PAGES * kv_page_bytes(backbone, BLOCK),
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, FAST),
        **changed,
    )


@pytest.fixture(scope="module")
def process_device() -> Iterator[Device]:
    device = ProcessDevice(settings())
    yield device
    device.close()


@pytest.fixture(params=["torch", "process"])
def device(request) -> Device:
    return (
        request.getfixturevalue("process_device") if request.param == "process" else make_device()
    )


@pytest.fixture
def driver(device) -> Driver:
    return Driver(device)


@cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random_tokens(length, seed).tolist())


# -- requests -------------------------------------------------------------------------


def test_a_request_gets_the_tokens_of_transformers_in_any_chunks(driver):
    for number, chunk in enumerate((1000, 5, 1)):
        tokens = driver.generate(f"r{number}", prompt(11), greedy(8), chunk=chunk)
        assert tuple(tokens) == expected_tokens(prompt(11), 8)


def test_requests_of_several_versions_share_a_step(driver):
    lora: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
    loaded = driver.device.execute(OpenVersion("v", adapter_directory(**lora)))
    assert loaded.num_bypasses == 6
    rows = []
    for number, version in enumerate(("", "v")):
        driver.open(str(number), greedy(1), version=version)
        rows.append(RequestRows(str(number), 0, prompt(9), driver.pages_for(9), samples=True))
    result = driver.step(requests=rows)
    assert (result.tokens["0"].token,) == expected_tokens(prompt(9), 1)
    assert (result.tokens["1"].token,) == expected_tokens(prompt(9), 1, **lora)
    driver.step(commands=[CloseRequest("1"), DropVersion("v")])
    with pytest.raises(AdapterError, match="has no adapter_config"):
        driver.device.execute(OpenVersion("w", "/nowhere"))


def test_pages_can_be_shared_with_an_earlier_request(driver):
    pages = driver.pages_for(12)
    driver.open("first", greedy(1))
    first = driver.step(requests=[RequestRows("first", 0, prompt(12), pages, samples=True)])
    driver.open("second", greedy(1), pages=pages[:2])
    rows = RequestRows(
        "second", 2 * BLOCK, prompt(12)[2 * BLOCK :], driver.pages_for(4), samples=True
    )
    second = driver.step(requests=[rows])
    assert second.tokens["second"].token == first.tokens["first"].token


def test_prompts_are_scored_and_the_likeliest_reported(driver):
    driver.open("r", SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, prompt_logprobs=3))
    ids = prompt(10)
    parts = []
    for start, end in ((0, 6), (6, 10)):
        rows = RequestRows(
            "r",
            start,
            ids[start:end],
            driver.pages_for(10) if not start else (),
            samples=end == 10,
            scored_row=start,
            targets=ids[start + 1 : min(end, 9) + 1],
        )
        parts.append(driver.step(requests=[rows]))
    found = [*parts[0].prompts["r"], *parts[1].prompts["r"]]
    with torch.inference_mode():
        logprobs = make_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    for row, one in enumerate(found):
        assert one.token == ids[row + 1]
        assert one.logprob == pytest.approx(float(logprobs[row, one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == logprobs[row].topk(3).indices.tolist()
    chosen = parts[1].tokens["r"]
    assert chosen.top[0] == (chosen.token, chosen.logprob) and len(chosen.top) == 2
    assert not parts[0].tokens


def test_penalties_count_what_the_device_chose_and_what_it_is_told(driver):
    """One that is opened again in the middle continues as one that was not interrupted."""
    params = SamplingParams(
        max_tokens=8, temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.5
    )
    whole = driver.generate("whole", prompt(7), params)
    plain = driver.generate("plain", prompt(7), greedy(8))
    assert whole != plain
    driver.open("again", params, prompt=prompt(7), output=tuple(whole[:4]))
    tokens = [*prompt(7), *whole[:4]]
    result = driver.step(
        requests=[RequestRows("again", 0, tuple(tokens), driver.pages_for(20), True, place=4)]
    )
    assert result.tokens["again"].token == whole[4]
    result = driver.step(requests=[RequestRows("again", 11, (whole[4],), (), True, place=5)])
    assert result.tokens["again"].token == whole[5]


def test_draws_depend_on_seed_and_place_alone(driver):
    params = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9)
    first = driver.generate("a", prompt(7), params, seed=5)
    driver.open("x", params, seed=5)
    again = driver.generate("b", prompt(7), params, seed=5)
    other = driver.generate("c", prompt(7), params, seed=6)
    assert first == again != other


def test_forbidden_tokens_do_not_come(driver):
    driver.open("r", greedy(1))
    rows = RequestRows("r", 0, prompt(9), driver.pages_for(9), samples=True)
    likeliest = driver.step(requests=[rows]).tokens["r"].token
    rows = RequestRows("r", 0, prompt(9), samples=True, forbidden=(likeliest,))
    assert driver.step(requests=[rows]).tokens["r"].token != likeliest


# -- jobs -----------------------------------------------------------------------------


def open_from_peft(driver: Driver, config: TuningConfig = CONFIG):
    """A job that continues `peft_twin()`."""
    driver.device.execute(OpenVersion("start", adapter_directory()))
    return driver.open_trainer("job", config, version="start")


def test_a_pack_costs_what_it_costs_in_peft_and_an_update_moves_by_its_gradient(driver, tmp_path):
    """AdamW's first step moves every parameter by the learning rate times the sign of its gradient,
    nearly; with SGD's large eps, by the gradient itself.
    """
    config = TuningConfig(optimizer=OptimizerConfig(learning_rate=1e6, eps=1e6, max_grad_norm=0.0))
    opened = open_from_peft(driver, config)
    result = driver.train("job", opened, SEQUENCES, window=7, tasklet=5)
    peft = exact_gradients("llama", SEQUENCES)
    sums = result.packs["job"]
    from engines import oracle  # the PEFT model itself

    expected = float(summed_loss(oracle("llama", (("r", 4),)), SEQUENCES).detach())
    assert sums.loss == pytest.approx(expected, rel=1e-5)
    assert sums.num_trained == NUM_TRAINED
    assert driver.step(updates=[Update("job", NUM_TRAINED, 1)]).norms["job"] == pytest.approx(
        float(torch.stack([g.norm() for g in peft.values()]).norm()) / NUM_TRAINED, rel=1e-4
    )
    before, after = load_file(Path(adapter_directory()) / FILE), saved(driver, tmp_path)
    for name, gradient in peft.items():
        moved = (before[PREFIX + name].double() - after[PREFIX + name].double()) * NUM_TRAINED
        assert float((moved - gradient).norm()) < 1e-3 * max(1.0, float(gradient.norm())), name


FILE, PREFIX = "adapter_model.safetensors", "base_model.model."


def saved(driver: Driver, directory: Path, job: str = "job") -> dict[str, torch.Tensor]:
    """A job's adapter as it is."""
    driver.device.execute(PublishVersion(job, "saved"))
    driver.device.execute(SaveAdapter("saved", str(directory / "saved")))
    driver.device.execute(DropVersion("saved"))
    return load_file(directory / "saved" / FILE)


def test_an_evaluation_measures_the_loss_and_leaves_no_gradient(driver, tmp_path):
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    assert len(opened.training) == len(opened.evaluation) == 1 + 1 + 3, (
        "workspace, embedding, three blocks"
    )
    assert opened.trained_parts == 3 and opened.counts.num_parameters > 0
    before = saved(driver, tmp_path)
    driver.begin("job", opened, SEQUENCES, evaluate=True)
    driver.step(windows=[WindowRows("job", NUM_ROWS)])
    evaluated = driver.step(losses=[LossRows("job", NUM_TRAINED)]).packs["job"]
    trained = driver.train("job", opened, SEQUENCES).packs["job"]
    assert evaluated.loss == pytest.approx(trained.loss, rel=1e-6)
    assert evaluated.num_correct == trained.num_correct
    assert driver.step(updates=[Update("job", NUM_TRAINED, 2)]).norms["job"] > 0
    after = saved(driver, tmp_path)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_packs_of_a_step_add_up_and_a_dropped_one_leaves_no_trace(driver, tmp_path):
    opened = driver.open_trainer("one", CONFIG, adapter=LORA)
    driver.train("one", opened, SEQUENCES)
    whole = driver.step(updates=[Update("one", NUM_TRAINED, 1)])
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    driver.begin("job", opened, SEQUENCES[:1])
    driver.step(windows=[WindowRows("job", 4)])
    driver.step(commands=[DropPack("job"), driver.begin_command("job", opened, SEQUENCES[:1])])
    driver.step(windows=[WindowRows("job", 9)])
    driver.step(losses=[LossRows("job", 1000)])
    driver.step(tasklets=[Tasklets("job", 1000, 3)])
    driver.train("job", opened, SEQUENCES[1:], tasklet=7)
    parts = driver.step(updates=[Update("job", NUM_TRAINED, 1)])
    assert parts.norms["job"] == pytest.approx(whole.norms["one"], rel=1e-5)


def test_a_mixed_step_gives_what_its_pieces_give_alone(driver):
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    other = driver.open_trainer("other", TuningConfig(seed=8), adapter=LORA)
    alone = driver.train("job", opened, SEQUENCES).packs["job"].loss
    driver.begin("other", other, SEQUENCES)
    driver.step(windows=[WindowRows("other", NUM_ROWS)])
    driver.step(losses=[LossRows("other", NUM_TRAINED)])
    driver.begin("job", opened, SEQUENCES)
    driver.open("r", greedy(1))
    rows = RequestRows("r", 0, prompt(11), driver.pages_for(11), samples=True)
    result = driver.step(
        requests=[rows], windows=[WindowRows("job", NUM_ROWS)], tasklets=[Tasklets("other", 10, 2)]
    )
    assert (result.tokens["r"].token,) == expected_tokens(prompt(11), 1)
    assert result.num_tasklets == {"other": 2} and not result.packs
    result = driver.step(
        losses=[LossRows("job", NUM_TRAINED)], tasklets=[Tasklets("other", 1000, 3)]
    )
    assert (
        result.packs.keys() == {"other"}
        and result.loss_s > 0
        and result.backward_s > 0
        and not result.update_s > 1
    )
    result = driver.step(tasklets=[Tasklets("job", 1000, 3)])
    assert result.packs["job"].loss == pytest.approx(alone, rel=1e-6)


def test_tasklets_stop_at_the_time_limit_but_for_the_steps_first(driver):
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    other = driver.open_trainer("other", CONFIG, adapter=LORA)
    for name, trainer in (("job", opened), ("other", other)):
        driver.begin(name, trainer, SEQUENCES)
        driver.step(windows=[WindowRows(name, NUM_ROWS)])
        driver.step(losses=[LossRows(name, NUM_TRAINED)])
    both = [Tasklets("job", 10, 7), Tasklets("other", 10, 7)]
    assert driver.step(tasklets=both, backward_limit_s=0.0).num_tasklets == {"job": 1, "other": 0}
    assert driver.step(tasklets=both, backward_limit_s=60.0).num_tasklets == {"job": 7, "other": 7}
    result = driver.step(tasklets=[Tasklets("job", 10, 1), Tasklets("other", 10, 2)])
    assert result.packs.keys() == {"job", "other"}


def test_tasklets_of_a_group_run_together_and_who_is_ahead_waits(driver, tmp_path):
    """Each job's losses and gradient are those of its run alone; three jobs, of which two have
    equal adapters."""
    jobs = {"a": LORA, "b": LORA, "c": {**LORA, "r": 2, "target_modules": ["q_proj", "down_proj"]}}
    packs = {"a": SEQUENCES, "b": SEQUENCES[:1], "c": SEQUENCES[1:]}
    num_rows = {job: sum(len(tokens) for tokens, _ in pack) for job, pack in packs.items()}
    num_trained = {job: sum(sum(trained[1:]) for _, trained in pack) for job, pack in packs.items()}
    opened = {
        job: driver.open_trainer(job, CONFIG, adapter=adapter) for job, adapter in jobs.items()
    }
    alone = {job: driver.train(job, opened[job], packs[job]).packs[job] for job in jobs}
    updates = [Update(job, num_trained[job], 1) for job in jobs]
    norms = driver.step(updates=updates).norms
    opened = {
        f"{job}2": driver.open_trainer(f"{job}2", CONFIG, adapter=adapter)
        for job, adapter in jobs.items()
    }
    for job, trainer in opened.items():
        driver.begin(job, trainer, packs[job[0]])
    driver.step(windows=[WindowRows(job, num_rows[job[0]]) for job in opened])
    driver.step(losses=[LossRows(job, 1000) for job in opened])
    driver.step(tasklets=[Tasklets("a2", 1000, 1)])
    group = [Tasklets("a2", 1000, 2, 7), Tasklets("b2", 1000, 3, 7), Tasklets("c2", 4, 50, 7)]
    ran = driver.step(tasklets=group, backward_limit_s=0.0)
    assert ran.num_tasklets == {"a2": 0, "b2": 1, "c2": 1}, "the one that is ahead waits"
    num_windows = -(-num_rows["c"] // 4)
    rest = [group[0], Tasklets("b2", 1000, 2, 7), Tasklets("c2", 4, 3 * num_windows - 1, 7)]
    done = driver.step(tasklets=rest)
    assert done.num_tasklets == {"a2": 2, "b2": 2, "c2": 3 * num_windows - 1}
    for job, sums in alone.items():
        together = done.packs[f"{job}2"]
        assert (
            together.loss == pytest.approx(sums.loss, rel=1e-6)
            and together.num_correct == sums.num_correct
        )
    updated = driver.step(updates=[Update(f"{job}2", num_trained[job], 1) for job in jobs])
    for job, norm in norms.items():
        assert updated.norms[f"{job}2"] == pytest.approx(norm, rel=1e-5)


def test_a_device_counts_each_command_that_it_answers_but_those_done_beside_steps(driver):
    def num_answered() -> int:
        return driver.device.execute(CountCommands()).num_answered

    before = num_answered()
    driver.device.execute(CloseRequest("nobody"))
    driver.step(commands=[DropVersion("none"), DropTrainer("none")])
    assert num_answered() == before + 3
    with pytest.raises(Exception, match="none"):
        driver.device.execute(PublishVersion("none", "v"))
    assert num_answered() == before + 4, "an error is an answer, too"
    with pytest.raises(AdapterError):
        driver.device.execute(OpenVersion("v", "/nowhere"))
    assert num_answered() == before + 4, "it comes beside steps"
    with pytest.raises(Exception, match="none"):
        driver.step(
            commands=[DropVersion("none"), PublishVersion("none", "v"), DropVersion("none")]
        )
    assert num_answered() == before + 6, "the last one has not been reached"


def test_a_device_describes_its_rank(driver):
    (rank,) = driver.device.execute(DescribeRanks()).ranks
    assert rank.pid == getattr(driver.device, "pid", os.getpid())
    assert rank.device == driver.device.info.device and driver.device.info.num_ranks == 1
    assert rank.memory_bytes > 1 << 20 and rank.waited_s == 0.0


def test_a_version_is_a_copy_and_a_checkpoint_continues_exactly(driver, tmp_path):
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    driver.train("job", opened, SEQUENCES)
    driver.step(updates=[Update("job", NUM_TRAINED, 2)])
    for command in (PublishVersion("job", "v1"), TakeCheckpoint("job", "c1")):
        driver.device.execute(command)
    first = driver.generate("r", prompt(9), greedy(4), version="v1")
    driver.train("job", opened, SEQUENCES)
    driver.step(updates=[Update("job", NUM_TRAINED, 2)])
    assert driver.generate("s", prompt(9), greedy(4), version="v1") == first
    (tmp_path / "c").mkdir()
    driver.device.execute(WriteCheckpoint("c1", str(tmp_path / "c")))
    driver.device.execute(DropCheckpoint("c1"))
    resumed = driver.open_trainer("again", CONFIG, checkpoint=str(tmp_path / "c"))
    driver.train("again", resumed, SEQUENCES)
    driver.step(updates=[Update("again", NUM_TRAINED, 2)])
    straight = saved(driver, tmp_path)
    again = saved(driver, tmp_path, "again")
    assert all(torch.equal(straight[name], again[name]) for name in straight)
    driver.device.execute(CloseTrainer("job"))
    driver.device.execute(PublishVersion("job", "last"))
    (tmp_path / "d").mkdir()
    driver.device.execute(TakeCheckpoint("job", "over"))
    driver.device.execute(WriteCheckpoint("over", str(tmp_path / "d")))
    assert (tmp_path / "c" / "optimizer.safetensors").exists()
    assert not (tmp_path / "d" / "optimizer.safetensors").exists()
    driver.device.execute(DropTrainer("job"))


def test_a_result_that_nobody_took_is_never_the_next_steps(driver):
    """The caller was interrupted: the engine forgets that step, and so must the device."""
    driver.open("r", greedy(1))
    forgotten = RequestRows("r", 0, prompt(5), driver.pages_for(11), samples=True)
    driver.device.submit(StepBatch(step=7, requests=(forgotten,)))
    rows = RequestRows("r", 0, prompt(11), samples=True)
    driver.device.submit(
        StepBatch(step=7, requests=(rows,))
    )  # numbers of steps that failed are used again
    assert (driver.device.collect().tokens["r"].token,) == expected_tokens(prompt(11), 1)


def test_a_pack_that_was_done_when_nobody_listened_counts_once(driver):
    """It is dropped, and begun again: its gradients must not be there already."""
    opened = driver.open_trainer("one", CONFIG, adapter=LORA)
    driver.train("one", opened, SEQUENCES[:1])
    driver.train("one", opened, SEQUENCES[1:])
    once = driver.step(updates=[Update("one", NUM_TRAINED, 1)])
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    driver.train("job", opened, SEQUENCES[:1])
    assert driver.train("job", opened, SEQUENCES[1:]).packs.keys() == {"job"}
    driver.device.execute(DropPack("job"))
    driver.train("job", opened, SEQUENCES[1:])
    again = driver.step(updates=[Update("job", NUM_TRAINED, 1)])
    assert again.norms["job"] == pytest.approx(once.norms["one"], rel=1e-6)


def test_a_gradient_that_is_not_finite_skips_the_step(driver, tmp_path):
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    before = saved(driver, tmp_path)
    driver.train("job", opened, SEQUENCES)
    # Divided by none at all: infinite.
    assert driver.step(updates=[Update("job", 0, 2)]).norms == {"job": None}
    after = saved(driver, tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_errors_of_commands_change_nothing(driver):
    with pytest.raises(AdapterError, match="peft_type 'mystery' is not supported"):
        driver.open_trainer("job", CONFIG, adapter={"peft_type": "mystery"})
    with pytest.raises(AdapterError):
        driver.open_trainer("job", CONFIG, checkpoint="/nowhere")
    driver.open_trainer("job", CONFIG, adapter=LORA)


# -- in this process alone --------------------------------------------------------------


def test_running_out_of_memory_is_a_result(monkeypatch, tmp_path):
    """Optimizer steps that were made stand; packs can be dropped, and everything be run again."""
    driver = Driver(make_device())
    jobs = {name: driver.open_trainer(name, CONFIG, adapter=LORA) for name in ("a", "b", "c")}
    for name, opened in jobs.items():
        driver.train(name, opened, SEQUENCES)
    driver.begin("c", jobs["c"], SEQUENCES)
    driver.open("r", greedy(1))
    rows = RequestRows("r", 0, prompt(11), driver.pages_for(11), samples=True)
    real_update, updated = TorchTrainer.update, []

    def update(self, *args):
        """The second one, which is that of b, finds no memory."""
        updated.append(self)
        if len(updated) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate")
        return real_update(self, *args)

    monkeypatch.setattr(TorchTrainer, "update", update)
    updates = [Update("a", NUM_TRAINED, 1), Update("b", NUM_TRAINED, 1)]
    result = driver.try_step(updates=updates, requests=[rows], windows=[WindowRows("c", 10)])
    assert result.failure.message == "CUDA out of memory. Tried to allocate"
    assert (
        result.failure.broken_update == "b" and result.norms.keys() == {"a"} and not result.tokens
    )
    monkeypatch.setattr(TorchTrainer, "update", real_update)

    def finish_window(self, hidden):
        raise MemoryError

    monkeypatch.setattr(TrainingPass, "finish_window", finish_window)
    again = RequestRows("r", 0, prompt(11), samples=True)
    result = driver.try_step(requests=[again], windows=[WindowRows("c", 10)])
    assert result.failure.message == "out of memory" and result.failure.broken_update is None
    monkeypatch.undo()
    result = driver.step(commands=[DropPack("c")], requests=[again])
    assert (result.tokens["r"].token,) == expected_tokens(prompt(11), 1)

    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(TorchTrainer, "update", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        driver.try_step(updates=updates[1:])


def test_numbers_are_read_one_by_one_where_there_is_no_memory_to_put_them_together(monkeypatch):
    """Optimizer steps have been made by then: the result is to say so."""
    driver = Driver(make_device())
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    driver.train("job", opened, SEQUENCES)
    driver.open("r", greedy(1, logprobs=2))
    rows = RequestRows("r", 0, prompt(11), driver.pages_for(11), samples=True)
    driver.device.submit(
        StepBatch(step=0, updates=(Update("job", NUM_TRAINED, 1),), requests=(rows,))
    )

    def full(*args, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", full)
    result = driver.device.collect()
    monkeypatch.undo()
    assert result.failure is None and result.norms["job"] > 0
    assert (result.tokens["r"].token,) == expected_tokens(prompt(11), 1) and len(
        result.tokens["r"].top
    ) == 2


class Waits(TorchDispatchMode):
    """Counts what makes the host of a GPU wait: values that decide something there, or how large a
    tensor is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0].removeprefix("aten::")
        if name in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "equal",
            "item",
            "is_nonzero",
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_asks_the_device_for_nothing_before_its_end():
    """Numbers that are computed on the device are read in `collect`; `submit` could run far ahead
    of a GPU. It runs on the plain kernels, as on a GPU: those for CPUs check their arguments.
    """
    driver = Driver(
        make_device(load_backbone(str(model_directory("llama")), dtype="float32", kernels="plain"))
    )
    jobs = {name: driver.open_trainer(name, CONFIG, adapter=LORA) for name in ("u", "b", "l", "w")}
    driver.train("u", jobs["u"], SEQUENCES)
    for name in "blw":
        driver.begin(name, jobs[name], SEQUENCES)
    for name in "bl":
        driver.step(windows=[WindowRows(name, NUM_ROWS)])
    driver.step(losses=[LossRows("b", NUM_TRAINED)])
    rows = []
    for name, params in {
        "greedy": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
        "drawn": SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2),
        "cut": SamplingParams(temperature=1.0, top_k=5),
    }.items():
        driver.open(name, params, prompt=prompt(9))
        targets = prompt(9)[1:] if name == "greedy" else ()
        rows.append(
            RequestRows(name, 0, prompt(9), driver.pages_for(9), samples=True, targets=targets)
        )
    with Waits() as waits:
        driver.device.submit(
            StepBatch(
                step=0,
                losses=(LossRows("l", NUM_TRAINED),),
                tasklets=(Tasklets("b", 1000, 3),),
                updates=(Update("u", NUM_TRAINED, 1),),
                requests=tuple(rows),
                windows=(WindowRows("w", NUM_ROWS),),
            )
        )
    assert waits.seen == []
    result = driver.device.collect()
    assert result.tokens.keys() == {"greedy", "drawn", "cut"} and len(result.prompts["greedy"]) == 8
    assert result.packs.keys() == {"b"} and result.norms.keys() == {"u"}


# -- in another process -----------------------------------------------------------------


def test_both_devices_tell_the_same_of_themselves(process_device):
    mine, its = make_device().info, process_device.info
    assert (
        msgspec.structs.replace(
            its, model=mine.model, threads=mine.threads, num_units=mine.num_units
        )
        == mine
    )


def test_a_step_in_another_process_leaves_this_one_free(process_device, tmp_path):
    """This process is free between submit and collect, to write a checkpoint, for example."""
    driver = Driver(process_device)
    opened = driver.open_trainer("job", CONFIG, adapter=LORA)
    driver.device.execute(TakeCheckpoint("job", "beside"))
    driver.begin("job", opened, SEQUENCES)
    driver.device.submit(StepBatch(step=99, windows=(WindowRows("job", NUM_ROWS),)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(driver.device.execute, [WriteCheckpoint("beside", str(tmp_path))]))
    assert driver.device.collect().step == 99
    assert (tmp_path / "optimizer.safetensors").exists()
    with pytest.raises(AdapterError, match="cannot write an adapter to /proc/nowhere"):
        driver.device.execute(WriteCheckpoint("beside", "/proc/nowhere/at/all"))


def test_a_bug_in_a_step_of_another_process_is_told_and_it_keeps_running(process_device):
    driver = Driver(process_device)
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        driver.try_step(updates=[Update("nobody", 1, 1)])
    assert tuple(driver.generate("r", prompt(9), greedy(3))) == expected_tokens(prompt(9), 3)


def test_a_device_that_cannot_start_says_why():
    with pytest.raises(UnknownModelError, match="'/nowhere' is not a directory"):
        ProcessDevice(msgspec.structs.replace(settings(), model="/nowhere"))


def test_a_process_that_dies_is_an_error_and_never_waited_for():
    device = ProcessDevice(settings())
    driver = Driver(device)
    driver.open("r", greedy(1))
    device.submit(StepBatch(step=0))
    device.collect()
    os.kill(device.pid, signal.SIGKILL)
    for _ in range(2):
        device.submit(StepBatch(step=1))
        with pytest.raises(DeviceGoneError, match="has ended"):
            device.collect()
        with pytest.raises(DeviceGoneError, match="has ended"):
            driver.open("s", greedy(1))
    device.close()


@pytest.mark.long
def test_the_process_ends_with_the_one_that_started_it():
    """Even if that is killed, in the middle of a step."""
    code = (
        "import sys, time; from test_devices import ProcessDevice, StepBatch, settings\n"
        "device = ProcessDevice(settings()); print(device.pid, flush=True); time.sleep(600)"
    )
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path]
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    for _ in range(200):
        if (
            not Path(f"/proc/{pid}/cmdline").exists()
            or not Path(f"/proc/{pid}/cmdline").read_bytes()
        ):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the device outlived its parent by ten seconds")


NONSENSE = b"\x05" + 7 * b"\0" + b"\xc1oops"  # a frame of five bytes, which are no msgpack


def test_a_device_that_is_told_nonsense_ends():
    own, its = socket.socketpair()
    with own, its:
        command = [sys.executable, "-m", "coserve.devices.process.main", str(its.fileno())]
        process = subprocess.Popen(
            command, pass_fds=(its.fileno(),), stderr=subprocess.PIPE, text=True
        )
        own.sendall(NONSENSE)
        _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "cannot be understood" in log


def test_nobody_waits_for_a_device_that_talks_nonsense(monkeypatch, tmp_path):
    started = msgspec.msgpack.encode(Started(make_device().info))
    (tmp_path / "frames").write_bytes(len(started).to_bytes(8, "little") + started)
    (tmp_path / "device").write_text(
        f"#!{sys.executable}\n"
        "import pathlib, socket, sys\n"
        "end = socket.socket(fileno=int(sys.argv[-1]))\n"
        "end.recv(1 << 16)\n"
        f"end.sendall(pathlib.Path({str(tmp_path / 'frames')!r}).read_bytes())\n"
        "end.recv(1 << 16)\n"
        f"end.sendall({NONSENSE!r})\n"
        "while end.recv(1 << 16): pass\n"
    )
    (tmp_path / "device").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "device"))
    device = ProcessDevice(settings())
    with ThreadPoolExecutor() as pool:
        with pytest.raises(DeviceGoneError, match="has ended"):
            pool.submit(device.execute, TakeCheckpoint("job", "c")).result(timeout=60)
        device.submit(StepBatch(step=0))
        with pytest.raises(DeviceGoneError, match="has ended"):
            pool.submit(device.collect).result(timeout=60)
    device.close()


def test_a_frame_that_was_sent_in_part_is_the_last():
    """Later frames could not be told from the rest of it."""
    own, its = socket.socketpair()

    class Interrupted(socket.socket):
        def sendall(self, data, flags=0):
            super().sendall(data[: len(data) // 2])
            raise KeyboardInterrupt

    sender = Connection(Interrupted(fileno=own.detach()), FromDevice)
    with pytest.raises(KeyboardInterrupt):
        sender.send(Started(make_device().info))
    with its, pytest.raises(EOFError):
        Connection(its, FromDevice).receive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        sender.send(Started(make_device().info))


# -- the messages -----------------------------------------------------------------------


def test_batches_and_results_survive_the_wire():
    batch = StepBatch(
        step=7,
        commands=(
            OpenRequest(
                request="r", params=SamplingParams(logit_bias={3: 1.5}, stop=("a",)), seed=2**62
            ),
        ),
        requests=(RequestRows("r", 3, (1, 2), (5,), True, 2, (0,), 3, (4,)),),
        tasklets=(Tasklets("j", 5, 2),),
        backward_limit_s=0.25,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=StepBatch) == batch
    result = StepResult(step=7, norms={"j": None}, num_tasklets={"j": 1})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


def decode(
    driver: Driver, request: str, tokens: list[int], number: int, new_pages: tuple[int, ...] = ()
) -> None:
    """Run a request's prompt, if none of it has run, then this many tokens."""
    start = 0 if new_pages else len(tokens) - 1
    for place in range(number):
        rows = RequestRows(
            request=request,
            start=start,
            tokens=tuple(tokens[start:]),
            new_pages=new_pages,
            samples=True,
            place=place,
        )
        start, new_pages = len(tokens), ()
        tokens.append(driver.step(requests=[rows]).tokens[request].token)


def test_a_request_decodes_from_where_its_pages_have_moved_to_while_nothing_else_changes():
    """Page tables that a device keeps of the same requests from step to step follow the move."""
    prompts = [random_tokens(11, seed).tolist() for seed in (1, 2)]
    driver = Driver(make_device())
    expected = driver.generate("alone", prompts[1], SamplingParams(temperature=0.0, max_tokens=7))
    for request in ("first", "second"):
        driver.open(request, SamplingParams(temperature=0.0))
    pages = [driver.pages_for(len(prompts[1]) + 7) for _ in range(3)]
    decode(driver, "first", list(prompts[0]), 1, pages[0])
    tokens = list(prompts[1])
    decode(driver, "second", tokens, 2, pages[1])
    driver.device.execute(MovePages(pages=pages[1], targets=pages[2]))
    driver.device.execute(
        MovePages(pages=pages[0], targets=pages[1])
    )  # the first one's come into its place
    decode(driver, "second", tokens, 5)
    assert tokens[len(prompts[1]) :] == expected
