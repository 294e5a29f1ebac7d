"""Preempted requests whose keys and values go to the host and come back: the same tokens, and fewer
rows to run."""

from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
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
from lengths import long_but
from random_plans import random_policy
from support import FAMILIES, make_backbone, model_directory, random_tokens

from coserve.adapters import LoraConfig
from coserve.devices.base import WallClock
from coserve.devices.loading import torch_device
from coserve.devices.messages.pages import SwapIn, SwapOut
from coserve.devices.messages.steps import StepFailure
from coserve.devices.process.device import ProcessDevice
from coserve.devices.settings import DeviceSettings
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import record
from coserve.engine.replay import replay
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.errors import BudgetError
from coserve.memory.tensors.host_pages import HostPages
from coserve.memory.tensors.paged_kv import PagedKv, kv_page_bytes
from coserve.models import load_backbone
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.scheduling.swapping import swap_pays
from coserve.simulate.hardware import A100
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig

# On the tiny model copying never pays with a bus of 22 GB/s and a device that is as fast as this
# one.
FAST_BUS = replace(FAST, host_bytes_per_s=1e15)
LENGTHS = (5, 1, 17, 9, 30, 4, 13)
NUM_TOKENS = 9


def swapping_engine(
    name: str = "llama", *, num_pages: int = 24, num_host_pages: int = 100, **settings: Any
) -> Engine:
    """With too few pages for its requests."""
    settings.setdefault("hardware", FAST_BUS)
    return make_engine(name, num_pages=num_pages, num_host_pages=num_host_pages, **settings)


def num_rows_run(engine: TokenEngine) -> int:
    return sum(len(rows.tokens) for batch in watched(engine).batches for rows in batch.requests)


def assert_greedy(engine: Engine, name: str = "llama", lengths: tuple[int, ...] = LENGTHS) -> None:
    prompts = {engine.add(prompt, greedy(NUM_TOKENS)): prompt for prompt in prompts_of(lengths)}
    got = tokens_by_request(drain(engine))
    for request, prompt in prompts.items():
        assert got[request] == expected_tokens(prompt, NUM_TOKENS, name), (request, len(prompt))


# -- tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_same_and_fewer_rows_are_run(name):
    engines = [swapping_engine(name), swapping_engine(name, num_host_pages=0)]
    for engine in engines:
        assert_greedy(engine, name)
        assert_nothing_is_held(engine)
        assert engine.num_preemptions > 0
    (swapping, plain), stats = engines, [engine.stats() for engine in engines]
    assert stats[0].num_swapped_out >= stats[0].num_swapped_in > 0
    assert stats[1].num_swapped_out == stats[1].num_swapped_in == 0
    assert num_rows_run(swapping) < num_rows_run(plain)
    commands = watched(swapping).commands
    for kind, number in ((SwapOut, stats[0].num_swapped_out), (SwapIn, stats[0].num_swapped_in)):
        assert (
            sum(len(command.pages) for command in commands if isinstance(command, kind)) == number
        )


@pytest.mark.parametrize("num_host_pages", [1, 4, 200])
@pytest.mark.parametrize("seed", long_but(0, of=range(4)))
def test_tokens_are_the_same_under_any_plan(seed, num_host_pages):
    """Shared prefixes, adapters, chunks, jobs that take the pages, scored prompts, requests that
    end early."""
    engine, rng = swapping_engine(num_pages=44, num_host_pages=num_host_pages), Random(seed)
    engine.policy = random_policy(seed)
    engine.load_adapter("a", adapter_directory(r=3))
    engine.submit_examples(
        examples_of((9, 14, 5, 11)),
        TuningConfig(num_epochs=2, max_pack_tokens=16),
        adapter=LoraConfig(r=2),
    )
    shared = random_tokens(11, 3).tolist()
    asked: dict[str, tuple[list[int], str | None]] = {}
    events, cancelled = [], set()
    for number, prompt in enumerate(prompts_of([rng.randint(5, 40) for _ in range(12)])):
        prompt = [*shared[: rng.randrange(12)], *prompt]
        adapter = rng.choice((None, "a"))
        params = greedy(25, prompt_logprobs=0 if number % 5 == 4 else None)
        asked[engine.add(prompt, params, adapter=adapter)] = prompt, adapter
        for _ in range(rng.randrange(4)):
            events += engine.step()
            engine.check_integrity()
        if rng.random() < 0.2:
            cancelled.add(gone := rng.choice(list(asked)))
            engine.cancel(gone)
            engine.check_integrity()
    got = tokens_by_request(events + drain(engine))
    for request, (prompt, adapter) in asked.items():
        if request not in cancelled:
            lora: dict[str, Any] = {"r": 3} if adapter else {}
            assert got[request] == expected_tokens(prompt, 25, **lora), request
    for job in list(engine.jobs):
        engine.cancel_job(job)
        engine.step()
    assert engine.stats().num_swapped_in > 0 or num_host_pages < 200
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_answers_are_the_same_bit_for_bit(dtype):
    def answers(**settings: Any) -> tuple[Any, TokenEngine]:
        engine = make_engine(dtype=dtype, deterministic=True, hardware=FAST_BUS, **settings)
        for prompt in prompts_of(LENGTHS):
            engine.add(prompt, greedy(NUM_TOKENS, logprobs=2))
        found: dict[str, list[Any]] = {}
        for event in drain(engine):
            assert isinstance(event, Chunk)
            found.setdefault(event.request, []).extend(event.logprobs)
        return found, engine

    undisturbed, _ = answers()
    swapped, engine = answers(num_pages=24, num_host_pages=100)
    assert engine.stats().num_swapped_in > 0
    assert swapped == undisturbed


def test_prompts_whose_tokens_are_scored_share_nothing_and_are_computed_again():
    engine = swapping_engine()
    params = greedy(NUM_TOKENS, prompt_logprobs=0)
    prompts = {engine.add(prompt, params): prompt for prompt in prompts_of(LENGTHS)}
    got = tokens_by_request(drain(engine))
    assert got == {
        request: expected_tokens(prompt, NUM_TOKENS) for request, prompt in prompts.items()
    }
    assert_nothing_is_held(engine)


# -- where it pays ------------------------------------------------------------------------


def gpu_profile(**changed: Any) -> Profile:
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    return replace(roofline_profile(backbone, A100), **changed)


def test_what_is_cheaper_by_the_latency_model_is_done():
    latency = LatencyModel(gpu_profile())
    rerun_s = latency.rerun_s(2000)
    assert rerun_s == pytest.approx(
        latency.prompt_s(2001) - latency.decode_s(num_requests=1, context=2000)
    )
    even = int(rerun_s / 2 / latency.copy_s(1))
    assert swap_pays(latency, num_tokens=2000, num_bytes=even - 1000)
    assert not swap_pays(latency, num_tokens=2000, num_bytes=even + 1000)
    page_bytes = 16 * 12288
    assert swap_pays(latency, num_tokens=4000, num_bytes=250 * page_bytes)
    slow_bus = LatencyModel(gpu_profile(s_per_copied_byte=1e-8))
    assert not swap_pays(slow_bus, num_tokens=4000, num_bytes=250 * page_bytes)
    for _ in range(100):  # this device turns out to be a tenth as fast
        latency.corrections.observe(
            "forward", 2001, False, predicted_s=latency.prompt_s(2001), measured_s=10 * rerun_s
        )
    assert swap_pays(latency, num_tokens=2000, num_bytes=5 * even)


def test_a_profile_from_before_says_that_copies_never_pay():
    fields = gpu_profile().to_json()
    assert Profile.from_json(fields) == gpu_profile()
    del fields["s_per_copied_byte"]
    latency = LatencyModel(Profile.from_json(fields))
    assert latency.copy_s(1) == inf and not swap_pays(latency, num_tokens=4000, num_bytes=1)


def test_an_engine_computes_again_what_it_would_take_longer_to_copy():
    engine = swapping_engine(hardware=FAST)
    assert_greedy(engine)
    assert engine.num_preemptions > 0 and engine.stats().num_swapped_out == 0
    assert_nothing_is_held(engine)


def test_host_memory_that_holds_no_page_is_refused():
    backbone = make_backbone()
    with pytest.raises(BudgetError, match="host memory needs"):
        torch_device(
            backbone,
            memory_bytes=1 << 20,
            host_memory_bytes=100,
            profile=roofline_profile(backbone, FAST),
        )
    with pytest.raises(ValueError, match="host_memory_bytes"):
        EngineConfig(host_memory_bytes=-1)


# -- endings and failures -------------------------------------------------------------------


def swapped_out(engine: TokenEngine) -> list[str]:
    """Step until something lies on the host; the requests that wait for it."""
    for prompt in prompts_of((40, 40, 40, 40)):
        engine.add_tokens(prompt, greedy(30))
    for _ in range(200):
        engine.step()
        engine.check_integrity()
        waiting = [
            request.request
            for request in engine.requests.waiting.values()
            if request.num_preemptions
        ]
        if engine.stats().num_swapped_out and waiting:
            return waiting
    raise AssertionError("nothing was swapped")


def test_requests_that_are_cancelled_while_they_are_swapped_give_everything_back():
    engine = swapping_engine(num_pages=44)
    assert swapped_out(engine)
    assert engine.stats().num_host_pages_used > 0
    for name in [request.request for request in engine.requests]:
        engine.cancel(name)
        engine.check_integrity()
    assert engine.stats().num_host_pages_used == 0
    drain(engine)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("action", ["submit", "within", "collect", "fail"])
def test_tokens_are_the_same_after_steps_that_failed(action):
    """A step with copies that could not begin, began and was interrupted, ended with an error, or
    ran out of memory."""
    engine = swapping_engine(num_pages=30)
    device = watched(engine)
    submit, collect, hits = device.inner.submit, device.inner.collect, [0]

    def is_hit(batch: Any) -> bool:
        has_copies = any(isinstance(command, SwapIn | SwapOut) for command in batch.commands)
        hits[0] += has_copies
        return has_copies and hits[0] <= 4

    def failing_submit(batch: Any) -> None:
        if is_hit(batch):
            if action == "within":
                submit(batch)
            raise KeyboardInterrupt
        submit(batch)

    def failing_collect() -> Any:
        result = collect()
        if is_hit(device.batches[-1]):
            raise KeyboardInterrupt
        return result

    if action == "fail":
        device.fail = lambda batch: StepFailure(message="out of memory") if is_hit(batch) else None
    elif action == "collect":
        device.inner.collect = failing_collect  # type: ignore[method-assign]
    else:
        device.inner.submit = failing_submit  # type: ignore[method-assign]
    prompts = {
        engine.add(prompt, greedy(40)): prompt for prompt in prompts_of((30, 25, 40, 17, 33, 28))
    }
    events: list[Any] = []
    for _ in range(500):
        with suppress(KeyboardInterrupt):
            events += engine.step()
        engine.check_integrity()
    assert hits[0] > 4 and not engine.has_requests
    got = tokens_by_request(events)
    assert got == {request: expected_tokens(prompt, 40) for request, prompt in prompts.items()}
    assert_nothing_is_held(engine)


# -- devices ------------------------------------------------------------------------------


def test_pages_come_back_from_the_host_as_they_were():
    pages = PagedKv(make_backbone(), num_pages=8, block_tokens=BLOCK)
    pages.storage.random_()
    host, before = HostPages(pages, num_slots=5), pages.storage.clone()
    host.copy_out([3, 4, 7, 0], [1, 2, 0, 4])
    pages.storage.zero_()
    host.copy_in([6, 1, 2, 5], [1, 2, 0, 4])
    host.wait()
    for old, new in ((3, 6), (4, 1), (7, 2), (0, 5)):
        assert pages.storage[new].equal(before[old])
    assert not pages.storage[[0, 3, 4, 7]].any()
    assert host.take_seconds() > 0 and host.take_seconds() == 0


def device_settings(num_pages: int) -> DeviceSettings:
    page_bytes = kv_page_bytes(make_backbone(), BLOCK)
    return DeviceSettings(
        model=str(model_directory("llama")),
        dtype="float32",
        device="cpu",
        threads=1,
        memory_bytes=num_pages * page_bytes,
        host_memory_bytes=100 * page_bytes,
        block_tokens=BLOCK,
        profile=roofline_profile(make_backbone(), FAST_BUS),
    )


def test_a_device_in_another_process_swaps_too():
    device = ProcessDevice(device_settings(24))
    try:
        engine = Engine(device, EngineConfig(block_tokens=BLOCK, tpot_s=1.0))
        assert engine.stats().num_host_pages == 100
        assert_greedy(engine)
        assert engine.stats().num_swapped_in > 0
        assert_nothing_is_held(engine)
    finally:
        device.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("swapped") / "file"
    page_bytes, backbone = kv_page_bytes(make_backbone(), BLOCK), make_backbone()
    device = torch_device(
        backbone,
        memory_bytes=24 * page_bytes,
        host_memory_bytes=100 * page_bytes,
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, FAST_BUS),
    )
    config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0)
    engine = record(Engine(WatchedDevice(device, WallClock()), config, end_tokens=()), str(file))
    for prompt in prompts_of(LENGTHS):
        engine.add_tokens(prompt, greedy(NUM_TOKENS))
    while engine.has_work:
        engine.step()
    assert engine.stats().num_swapped_in > 0
    engine.device.close()
    return file


@pytest.mark.parametrize("kind", ["torch", "modelled"])
def test_a_recording_with_copies_is_run_again(recording, kind):
    header, lines = read_recording(recording)
    backbone, info = make_backbone(), header.info
    assert info.num_host_pages == 100
    pages: dict[str, Any] = {"block_tokens": BLOCK, "profile": info.profile}
    if kind == "modelled":
        device: Any = ModelledDevice(backbone, num_pages=24, num_host_pages=100, **pages)
    else:
        device = torch_device(
            backbone,
            memory_bytes=24 * info.page_bytes,
            host_memory_bytes=100 * info.page_bytes,
            **pages,
        )
    report = replay(header, lines, device)
    assert report.plans_equal, report.diverged
    assert report.steps > 10 and (report.tokens_equal or kind == "modelled")


# -- in simulated time ------------------------------------------------------------------------


def simulated(num_host_pages: int, *, num_pages: int, seed: int) -> tuple[float, int, TokenEngine]:
    """More long prompts at once than there is room for: seconds until all are answered, and rows
    that were run."""
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, A100)
    modelled = ModelledDevice(backbone, profile, num_pages=num_pages, num_host_pages=num_host_pages)
    num_rows, submit = [0], modelled.submit

    def counting_submit(batch: Any) -> None:
        num_rows[0] += sum(len(rows.tokens) for rows in batch.requests)
        submit(batch)

    modelled.submit = counting_submit  # type: ignore[method-assign]
    engine = TokenEngine(modelled, LatencyModel(profile), EngineConfig(ttft_s=100.0, tpot_s=1.0))
    rng = Random(seed)
    arrivals = [
        Arrival(
            at_s=0.05 * number,
            num_prompt_tokens=rng.randint(500, 1500),
            num_output_tokens=rng.randint(200, 600),
        )
        for number in range(30)
    ]
    for snapshot in Simulation(engine, arrivals).run(10_000.0):
        last_s = snapshot.now_s
    engine.check_integrity()
    assert len(engine.records) == 30
    return last_s, num_rows[0], engine


@pytest.mark.parametrize("seed", long_but(0, of=range(3)))
def test_under_pressure_swapping_is_never_slower(seed):
    plain_s, plain_rows, without = simulated(0, num_pages=400, seed=seed)
    swapped_s, swapped_rows, engine = simulated(4000, num_pages=400, seed=seed)
    assert without.num_preemptions > 0 and engine.stats().num_swapped_in > 0
    assert swapped_rows < plain_rows
    assert swapped_s <= plain_s
    assert engine.stats().num_host_pages_used == 0
    whole_pool_s = engine.latency.copy_s(400 * engine.device.info.page_bytes)
    assert without.stats().give_back_s == 0 < engine.stats().give_back_s < 2 * whole_pool_s
