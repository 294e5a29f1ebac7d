"""Adapters that nobody reads and optimizers of paused jobs go to the host: the same numbers as
without, bit for bit."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    FAST,
    WatchedDevice,
    adapter_directory,
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
from random_plans import random_policy
from safetensors.torch import load_file
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.base import WallClock
from coserve.devices.loading import torch_device
from coserve.devices.messages.commands import Command, DropVersion, OpenVersion
from coserve.devices.messages.pages import SwapInTensors, SwapOutTensors
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import record
from coserve.engine.replay import replay
from coserve.engine.request import Chunk
from coserve.errors import DeviceMemoryError
from coserve.memory.tensors.host_pages import HostPages
from coserve.memory.tensors.paged_kv import PagedKv, kv_page_bytes
from coserve.models import load_backbone
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.swapping import optimizer_swap_pays
from coserve.simulate.hardware import A100
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

FAST_BUS = replace(FAST, host_bytes_per_s=1e15)
LORA = LoraConfig(r=3, target_modules="all-linear", dropout=0.2)
LENGTHS = (9, 14, 5, 20, 11, 7, 3)
CONFIG = TuningConfig(
    num_epochs=3,
    batch_size=3,
    max_pack_tokens=20,
    seed=4,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
NUM_ADAPTERS = 4


def swapping_engine(**settings: Any) -> Engine:
    settings = {
        "num_pages": 300,
        "num_host_pages": 600,
        "hardware": FAST_BUS,
        "deterministic": True,
        **settings,
    }
    return make_engine(**settings)


def submit(engine: Engine, **named: Any) -> str:
    named = {"adapter": LORA, "name": "mine", **named}
    return engine.submit_examples(examples_of(LENGTHS), CONFIG, **named)


def num_told(engine: Engine, kind: type[Command]) -> int:
    return sum(isinstance(command, kind) for command in watched(engine).commands)


def losses_of(events: list[Any]) -> list[tuple[int, float | None, float | None]]:
    return [
        (event.step, event.loss, event.norm)
        for event in events
        if getattr(event, "kind", "") == "step"
    ]


def saved(engine: Engine, directory: Path) -> dict[str, Any]:
    engine.save_adapter("mine", directory)
    return load_file(directory / "adapter_model.safetensors")


def run(engine: Engine, *, before_step: Callable[[], None] = lambda: None) -> list[Any]:
    """Until no job is left; the events."""
    events: list[Any] = []
    while engine.has_work:
        before_step()
        events += engine.step()
        engine.check_integrity()
    return events


def fail_once(
    engine: Engine,
    kind: type[Command],
    error: BaseException,
    *,
    after: bool = False,
    times: int = 1,
) -> None:
    """The device raises this for its next commands of a kind, before or after they are done."""
    inner = watched(engine).inner
    execute, left = inner.execute, iter(range(times))

    def call(command: Any) -> Any:
        fails = isinstance(command, kind) and next(left, None) is not None
        if fails and not after:
            raise error
        reply = execute(command)
        if fails:
            raise error
        return reply

    inner.execute = call  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[list[Any], dict[str, Any]]:
    """Losses of each step, and what came of the adapter."""
    engine = make_engine(num_pages=300, deterministic=True)
    submit(engine)
    events = run(engine)
    return losses_of(events), saved(engine, tmp_path_factory.mktemp("undisturbed"))


def assert_same(engine: Engine, events: list[Any], undisturbed: Any, directory: Path) -> None:
    losses, adapter = undisturbed
    assert losses_of(events) == losses
    ours = saved(engine, directory)
    assert all(torch.equal(ours[name], adapter[name]) for name in adapter)
    assert_nothing_is_held(engine)


# -- slots --------------------------------------------------------------------------------


def test_tensors_come_back_from_scattered_slots_as_they_were():
    pages = PagedKv(make_backbone("llama"), num_pages=2, block_tokens=4)
    host = HostPages(pages, num_slots=40)
    tensors = [torch.randn(shape) for shape in ((3, 5), (), (1,), (700,), (2, 300))]
    tensors += [
        torch.randint(0, 255, (77,), dtype=torch.uint8),
        torch.randn(9, 4).to(torch.bfloat16).T,
    ]
    num_slots = -(-sum(tensor.nbytes for tensor in tensors) // pages.page_bytes)
    slots = Random(0).sample(range(40), num_slots)
    host.store(tensors, slots)
    for tensor, back in zip(tensors, host.load(tensors, slots), strict=True):
        assert torch.equal(tensor, back) and tensor.dtype == back.dtype


def test_an_optimizer_goes_to_the_host_where_copies_are_quicker_than_its_rows():
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    latency = LatencyModel(roofline_profile(backbone, A100))
    counts = JobCounts(
        flops_per_row=1e6,
        backward_flops_per_row=3e7,
        backward_flops_per_pair=1e3,
        num_parts=24,
        num_bypasses=48,
        num_parameters=10**6,
    )
    assert not optimizer_swap_pays(latency, counts, num_rows=0, num_bytes=1), (
        "nothing would be lost"
    )
    pays = [
        optimizer_swap_pays(latency, counts, num_rows=2 * rows, num_bytes=10**9)
        for rows in (10, 10**3, 10**6)
    ]
    assert pays == [False, False, True]


# -- optimizers of paused jobs ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_is_paused_learns_the_same(seed, undisturbed, tmp_path):
    engine, rng = swapping_engine(), Random(seed)
    engine.policy = random_policy(seed)
    job = engine.job(submit(engine))

    def rest() -> None:
        if rng.random() < 0.15 and not job.is_terminal:
            engine.pause_job(job.id)
            assert job.optimizer_away == (job.num_steps_done > 0)
            assert engine.stats().num_host_pages_used > 0 or not job.num_steps_done
            engine.add(prompts_of([rng.randint(5, 50)])[0], greedy(3))
            drain(engine)
            engine.resume_job(job.id)

    events = run(engine, before_step=rest)
    assert num_told(engine, SwapInTensors) == num_told(engine, SwapOutTensors) > 2
    stats = engine.stats()
    assert stats.num_swapped_in == stats.num_swapped_out
    assert_same(engine, events, undisturbed, tmp_path)


def test_a_checkpoint_of_a_job_whose_optimizer_is_away_is_whole(undisturbed, tmp_path):
    engine = swapping_engine()
    job, events = engine.job(submit(engine)), []
    while job.num_steps_done < 3:
        events += engine.step()
    engine.pause_job(job.id)
    assert job.optimizer_away
    directory = engine.checkpoint(job.id).write(tmp_path / "checkpoints")
    assert job.optimizer_away, "it is read where it lies"
    other = swapping_engine()
    submit(other, adapter=None, checkpoint=directory)
    assert_same(other, losses_of(events) and events + run(other), undisturbed, tmp_path / "ours")


def test_an_optimizer_without_room_stays(undisturbed, tmp_path):
    engine = swapping_engine(num_host_pages=1)
    job, events = engine.job(submit(engine)), []
    while job.num_steps_done < 3:
        events += engine.step()
    engine.pause_job(job.id)
    assert not job.optimizer_away and not engine.stats().num_host_pages_used
    engine.resume_job(job.id)
    assert_same(engine, events + run(engine), undisturbed, tmp_path)


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_nothing_stays_on_the_host_of_a_job_that_ends_while_its_optimizer_is_there(ending):
    engine = swapping_engine()
    job = engine.job(submit(engine))
    while job.num_steps_done < 3:
        engine.step()
    engine.pause_job(job.id)
    assert job.optimizer_away
    if ending == "cancelled":
        engine.cancel_job(job.id)
    else:  # it never finds the memory to come back to
        fail_once(engine, SwapInTensors, DeviceMemoryError("no memory"), times=10)
        engine.resume_job(job.id)
        run(engine)
        assert job.error is not None and "out of memory 10 times in a row" in job.error
    assert job.state == ending and not job.optimizer_away
    engine.forget_job(job.id)
    engine.step()
    assert_nothing_is_held(engine)


def test_a_job_waits_for_the_memory_that_its_optimizer_comes_back_to(undisturbed, tmp_path):
    engine = swapping_engine()
    job, events = engine.job(submit(engine)), []
    while job.num_steps_done < 3:
        events += engine.step()
    engine.pause_job(job.id)
    fail_once(engine, SwapInTensors, DeviceMemoryError("no memory"), times=3)
    engine.resume_job(job.id)
    events += run(engine)
    assert job.state == "succeeded" and num_told(engine, SwapInTensors) == 1
    assert_same(engine, events, undisturbed, tmp_path)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [SwapOutTensors, SwapInTensors], ids=lambda kind: kind.__name__)
def test_a_caller_may_be_interrupted_in_any_copy(kind, after, undisturbed, tmp_path):
    engine = swapping_engine()
    job, events = engine.job(submit(engine)), []
    fail_once(engine, kind, KeyboardInterrupt(), after=after, times=2)
    while not job.is_terminal:
        with suppress(KeyboardInterrupt):
            events += engine.step()
        engine.check_integrity()
        if job.num_steps_done in (2, 4) and not job.has_pack and not job.is_terminal:
            with suppress(KeyboardInterrupt):
                engine.pause_job(job.id)
            engine.resume_job(job.id)
    assert num_told(engine, SwapInTensors) > 1
    assert_same(engine, events, undisturbed, tmp_path)


# -- adapters -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directories() -> list[str]:
    return [adapter_directory(r=rank) for rank in range(2, 2 + NUM_ADAPTERS)]


def ask(engine: Engine, directories: list[str], number: int, prompt: list[int]) -> str:
    engine.ensure_adapter(f"a{number}", directories[number])
    return engine.add(prompt, greedy(6), adapter=f"a{number}")


def serve(engine: Engine, directories: list[str], seed: int) -> None:
    """Requests for adapters in random order, one after the other or at once: transformers'
    answers."""
    rng, asked, events = Random(seed), {}, []
    for index in range(16):
        number, prompt = (
            rng.randrange(NUM_ADAPTERS),
            prompts_of([rng.randint(3, 12)], seed=index)[0],
        )
        asked[ask(engine, directories, number, prompt)] = prompt, number
        events += drain(engine) if rng.random() < 0.7 else engine.step()
    got = tokens_by_request(events + drain(engine))
    for request, (prompt, number) in asked.items():
        assert got[request] == expected_tokens(prompt, 6, r=2 + number), (request, number)


@pytest.mark.parametrize("seed", range(2))
def test_adapters_that_nobody_reads_go_to_the_host_and_come_back(seed, directories):
    engine = swapping_engine(max_adapters=2)
    serve(engine, directories, seed)
    assert num_told(engine, OpenVersion) == NUM_ADAPTERS, "none is read from disk again"
    stats = engine.stats()
    assert stats.num_swapped_out > stats.num_swapped_in > 0 and stats.num_host_pages_used > 0
    for number in range(NUM_ADAPTERS):
        engine.unload_adapter(f"a{number}")
    assert_nothing_is_held(engine)


def test_the_copies_that_are_computed_with_are_made_again(directories):
    """In bfloat16: from the float32 parameters, which alone lie on the host."""
    engines = [swapping_engine(dtype="bfloat16", max_adapters=most) for most in (1, 64)]
    for number in (0, 1, 0, 1):
        chunks = []
        for engine in engines:
            ask(engine, directories, number, prompts_of([7])[0])
            chunks.append(
                [(each.tokens, each.logprobs) for each in drain(engine) if isinstance(each, Chunk)]
            )
        assert chunks[0] == chunks[1]
    assert [num_told(engine, SwapInTensors) for engine in engines] == [2, 0]


def test_adapters_without_room_on_the_host_are_read_from_disk_again(directories):
    engine = swapping_engine(max_adapters=2, num_host_pages=1)
    serve(engine, directories, seed=0)
    assert num_told(engine, OpenVersion) > NUM_ADAPTERS and num_told(engine, DropVersion) > 2
    assert not engine.stats().num_swapped_out


def test_older_versions_of_a_job_go_to_the_host(tmp_path):
    """Which no disk has; all that asks for one of them finds it."""
    config = replace(CONFIG, publish_every_steps=1)
    engines = [swapping_engine(max_adapters=1), make_engine(num_pages=300, deterministic=True)]
    found = []
    for engine in engines:
        engine.submit_examples(examples_of(LENGTHS), config, adapter=LORA, name="mine")
        run(engine)
        assert engine is engines[1] or engine.stats().num_host_pages_used > 0
        (prompt,) = prompts_of([7])
        request = engine.add(prompt, greedy(6), adapter="mine@2")
        tokens = tokens_by_request(drain(engine))[request]
        engine.save_adapter("mine@1", tmp_path / f"first-{engine is engines[0]}")
        again = engine.submit_examples(examples_of((5, 9)), CONFIG, adapter="mine@1", name="again")
        events = run(engine)
        assert engine.job(again).state == "succeeded"
        found.append(
            (tokens, losses_of([event for event in events if isinstance(event, JobEvent)]))
        )
    assert found[0] == found[1]
    first, second = (
        load_file(tmp_path / f"first-{which}" / "adapter_model.safetensors")
        for which in (True, False)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_requests_end_with_the_reason_if_their_adapter_cannot_come_back(directories):
    engine = swapping_engine(max_adapters=1)
    (prompt,) = prompts_of([7])
    for number in (0, 1):
        ask(engine, directories, number, prompt)
        drain(engine)
    fail_once(engine, SwapInTensors, DeviceMemoryError("no memory"))
    lost = ask(engine, directories, 0, prompt)
    (end,) = [
        event for event in drain(engine) if isinstance(event, Chunk) and event.request == lost
    ]
    assert (
        end.finish_reason == "error"
        and end.error == "the device has no memory for its adapter: no memory"
    )
    again = ask(engine, directories, 0, prompt)
    assert tokens_by_request(drain(engine))[again] == expected_tokens(prompt, 6, r=2)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "kind", [SwapOutTensors, SwapInTensors, DropVersion], ids=lambda kind: kind.__name__
)
def test_a_caller_may_be_interrupted_while_an_adapter_moves(kind, after, directories):
    engine = swapping_engine(max_adapters=1)
    asked, events = {}, []
    fail_once(engine, kind, KeyboardInterrupt(), after=after, times=2)
    for number in (0, 1, 2, 0, 1, 2):
        (prompt,) = prompts_of([5 + number])
        with suppress(KeyboardInterrupt):
            engine.ensure_adapter(f"a{number}", directories[number])
        asked[engine.add(prompt, greedy(6), adapter=f"a{number}")] = prompt, number
        while engine.has_requests:
            with suppress(KeyboardInterrupt):
                events += engine.step()
            engine.check_integrity()
        if number == 2:
            with suppress(KeyboardInterrupt):
                engine.unload_adapter("a2")
    got = tokens_by_request(events)
    for request, (prompt, number) in asked.items():
        assert got[request] == expected_tokens(prompt, 6, r=2 + number)
    for number in (0, 1):
        engine.unload_adapter(f"a{number}")
    engine.step()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["torch", "modelled"])
def test_a_recording_of_it_is_run_again(kind, directories, tmp_path):
    file = str(tmp_path / "recording")
    backbone = make_backbone()
    page_bytes, profile = kv_page_bytes(backbone, BLOCK), roofline_profile(backbone, FAST_BUS)
    memory: dict[str, Any] = {
        "memory_bytes": 300 * page_bytes,
        "host_memory_bytes": 600 * page_bytes,
    }

    def make_device() -> Any:
        return torch_device(backbone, block_tokens=BLOCK, profile=profile, **memory)

    config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0, max_adapters=1)
    engine = record(Engine(WatchedDevice(make_device(), WallClock()), config, end_tokens=()), file)
    job = engine.job(submit(engine))
    while job.num_steps_done < 3:
        engine.step()
    engine.pause_job(job.id)
    for number in (0, 1, 0):
        ask(engine, directories, number, prompts_of([7])[0])
        drain(engine)
    engine.resume_job(job.id)
    run(engine)
    assert engine.stats().num_swapped_in > 0
    engine.device.close()
    header, lines = read_recording(file)
    pages: dict[str, Any] = {"num_pages": 300, "num_host_pages": 600, "block_tokens": BLOCK}
    device = make_device() if kind == "torch" else ModelledDevice(backbone, profile, **pages)
    report = replay(header, lines, device)
    assert report.plans_equal, report.diverged
    assert report.steps > 10 and (report.tokens_equal or kind == "modelled")
