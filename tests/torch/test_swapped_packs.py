"""Packs of jobs that go to the host and come back: the same adapters, and no row is run twice."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
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
from lengths import long_but
from progress import make_job
from random_plans import random_policy
from safetensors.torch import load_file

from coserve.adapters import LoraConfig
from coserve.devices.messages.jobs import DropPack
from coserve.devices.messages.pages import MovePack, SwapIn, SwapOut
from coserve.devices.messages.steps import StepBatch
from coserve.engine.engine import Engine
from coserve.models import load_backbone
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobProgress
from coserve.scheduling.policies import make_policy
from coserve.scheduling.swapping import pack_swap_pays
from coserve.simulate.hardware import A100
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

FAST_BUS = replace(FAST, host_bytes_per_s=1e15)
LORA = LoraConfig(r=3, target_modules="all-linear", dropout=0.2)
LENGTHS = (9, 14, 5, 20, 11, 7, 3)
CONFIG = TuningConfig(
    num_epochs=2,
    batch_size=3,
    max_pack_tokens=20,
    seed=4,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def swapping_engine(*, num_pages: int = 300, num_host_pages: int = 300, **settings: Any) -> Engine:
    return make_engine(
        num_pages=num_pages, num_host_pages=num_host_pages, hardware=FAST_BUS, **settings
    )


def submit(engine: Engine, **named: Any) -> str:
    return engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", **named)


def saved(engine: Engine, directory: Path) -> dict[str, Any]:
    engine.save_adapter("mine", directory)
    return load_file(directory / "adapter_model.safetensors")


def num_rows_run(engine: Engine) -> int:
    return sum(window.num_rows for batch in watched(engine).batches for window in batch.windows)


def num_told(engine: Engine, kind: type) -> int:
    return sum(isinstance(command, kind) for command in watched(engine).commands)


def assert_same(
    engine: Engine, expected: dict[str, Any], directory: Path, *, tolerance: float = 1e-6
) -> None:
    ours = saved(engine, directory)
    assert max(float((ours[name] - expected[name]).abs().max()) for name in expected) <= tolerance
    assert_nothing_is_held(engine)


def learned(directory: Path, **settings: Any) -> dict[str, Any]:
    engine = make_engine(**settings)
    engine.tune(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")
    return saved(engine, directory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
    return learned(tmp_path_factory.mktemp("undisturbed"))


def use_other_pages(engine: Engine, rng: Random) -> None:
    """Requests come and go, whose keys and values overwrite whatever lay in the pages."""
    prompts = {
        engine.add(prompt, greedy(3)): prompt for prompt in prompts_of([rng.randint(20, 90)] * 3)
    }
    got = tokens_by_request(drain(engine))
    assert got == {request: expected_tokens(prompt, 3) for request, prompt in prompts.items()}


@pytest.mark.parametrize("seed", long_but(0, of=[0, 1, 3]))
def test_a_job_that_is_paused_resumes_where_it_was(seed, undisturbed, tmp_path):
    engine, rng = swapping_engine(), Random(seed)
    engine.policy = random_policy(seed)
    job = engine.job(submit(engine))
    phases = set()
    while not job.is_terminal:
        if job.has_pack and rng.random() < 0.2:
            phases.add(job.phase)
            engine.pause_job(job.id)
            assert not job.has_pack and not engine.pool.num_pages_by_owner().get("activations")
            use_other_pages(engine, rng)
            engine.resume_job(job.id)
        engine.step()
        engine.check_integrity()
    assert phases == {"forward", "loss", "backward"}
    assert engine.stats().num_swapped_in == engine.stats().num_swapped_out > 0
    assert num_rows_run(engine) == CONFIG.num_epochs * sum(LENGTHS), "none is run again"
    assert_same(engine, undisturbed, tmp_path)


def test_a_deterministic_job_learns_the_same_bit_for_bit(tmp_path):
    expected = learned(tmp_path / "expected", deterministic=True)
    engine, rng = swapping_engine(deterministic=True), Random(0)
    engine.policy = random_policy(0)
    job = engine.job(submit(engine))
    while not job.is_terminal:
        if job.has_pack and rng.random() < 0.2:
            engine.pause_job(job.id)
            use_other_pages(engine, rng)
            engine.resume_job(job.id)
        engine.step()
    assert num_told(engine, MovePack) > 3
    assert_same(engine, expected, tmp_path / "ours", tolerance=0.0)


@pytest.mark.parametrize("num_host_pages", [40, 300])
@pytest.mark.parametrize("seed", long_but(0, of=range(3)))
def test_packs_give_way_to_requests_and_come_back(seed, num_host_pages, undisturbed, tmp_path):
    """Also where the host has room for some of them alone."""
    engine, rng = swapping_engine(num_pages=105, num_host_pages=num_host_pages), Random(seed)
    engine.policy = random_policy(seed)
    job = engine.job(submit(engine, validation=examples_of((9, 4))))
    other = engine.submit_examples(
        examples_of((6, 10, 12), 9), TuningConfig(num_epochs=8), adapter=LORA
    )
    asked: dict[str, list[int]] = {}
    events: list[Any] = []
    while not job.is_terminal:
        if len(asked) < 60 and rng.random() < 0.3:
            (prompt,) = prompts_of([rng.randint(5, 60)], seed=len(asked))
            asked[engine.add(prompt, greedy(12))] = prompt
        events += engine.step()
        engine.check_integrity()
    if not engine.jobs[other].is_terminal:
        engine.cancel_job(other)
    got = tokens_by_request(events + drain(engine))
    assert got == {request: expected_tokens(prompt, 12) for request, prompt in asked.items()}
    assert num_told(engine, MovePack) > 0 or num_host_pages == 40 or seed == 2
    assert_same(engine, undisturbed, tmp_path)


def test_nothing_stays_on_the_host_of_a_job_that_is_cancelled_while_it_is_there():
    engine = swapping_engine()
    engine.policy = random_policy(0)
    job = engine.job(submit(engine))
    while job.phase != "backward":
        engine.step()
    engine.pause_job(job.id)
    assert engine.stats().num_host_pages_used > 0
    engine.cancel_job(job.id)
    engine.check_integrity()
    assert engine.stats().num_host_pages_used == 0
    engine.step()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pack_resumes_where_the_step_that_copies_it_is_interrupted(after, undisturbed, tmp_path):
    """Its copy is made once: before the step that follows, or by the step whose end nobody saw."""
    engine = swapping_engine()
    engine.policy = random_policy(1)
    inner, hit = watched(engine).inner, list[StepBatch]()
    inner_submit, job = inner.submit, engine.job(submit(engine))

    def failing_submit(batch: StepBatch) -> None:
        interrupted = not hit and any(isinstance(command, SwapOut) for command in batch.commands)
        if after or not interrupted:
            inner_submit(batch)
        if interrupted:
            hit.append(batch)
            raise KeyboardInterrupt

    inner.submit = failing_submit  # type: ignore[method-assign]
    other = engine.submit_examples(
        examples_of((6, 10, 12), 9), TuningConfig(num_epochs=20), adapter=LORA
    )
    while not job.is_terminal:
        if job.phase == "backward" and job.has_pack and not hit:
            num_drops = job.progress.num_drops
            engine.jobs.drop(job)  # as a plan may, which a step for requests alone follows
            engine.add(prompts_of((5,))[0], greedy(2))
            engine.policy = make_policy("inference-only")
            with suppress(KeyboardInterrupt):
                engine.step()
            assert job.progress.num_drops == num_drops, "it is not begun again"
            engine.policy = random_policy(1)
        engine.step()
        engine.check_integrity()
    engine.cancel_job(other)
    engine.step()
    assert len(hit) == 1
    assert_same(engine, undisturbed, tmp_path)


@pytest.mark.parametrize("after", long_but(True, of=[False, True]), ids=["before", "after"])
@pytest.mark.parametrize(
    "kind", [SwapOut, SwapIn, MovePack, DropPack], ids=lambda kind: kind.__name__
)
def test_a_caller_may_be_interrupted_in_any_copy(kind, after, undisturbed, tmp_path):
    engine = swapping_engine(
        num_host_pages=40 if kind is DropPack else 60
    )  # 40 are too few for a pack
    engine.policy = random_policy(1)
    inner = watched(engine).inner
    execute, left = inner.execute, iter([True, True])

    def call(command: Any) -> Any:
        interrupted = isinstance(command, kind) and next(left, False)
        if interrupted and not after:
            raise KeyboardInterrupt
        reply = execute(command)
        if interrupted:
            raise KeyboardInterrupt
        return reply

    inner.execute = call  # type: ignore[method-assign]

    def until_done(do: Callable[..., Any], *args: Any) -> None:
        while True:
            with suppress(KeyboardInterrupt):
                do(*args)
                return
            engine.check_integrity()

    job, rng = engine.job(submit(engine)), Random(0)
    while not job.is_terminal:
        until_done(engine.step)
        engine.check_integrity()
        if job.has_pack and rng.random() < 0.4:
            until_done(engine.pause_job, job.id)
            until_done(engine.flush_commands)
            until_done(engine.resume_job, job.id)
    assert next(left, None) is None, "both happened"
    assert_same(engine, undisturbed, tmp_path)


# -- where it pays ------------------------------------------------------------------------


def test_a_pack_goes_to_the_host_where_copies_are_quicker_than_what_it_has_done():
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

    def at(phase: Any, num_rows_left: int, num_parts_left: int) -> JobProgress:
        return make_job(
            "job",
            phase,
            num_rows=2000,
            num_rows_left=num_rows_left,
            num_parts_left=num_parts_left,
            mean_context_len=500.0,
            counts=counts,
        )

    begun, forward, backward = (
        at("forward", 2000, 24),
        at("forward", 100, 24),
        at("backward", 1000, 10),
    )
    assert not pack_swap_pays(latency, begun, num_bytes=1), "nothing would be lost"
    whole_s = latency.pack_s(begun)
    for job, share in ((forward, 0.475), (backward, (1 + 14.5 / 24) / 2)):
        even = share * whole_s / latency.copy_s(2)
        assert pack_swap_pays(latency, job, num_bytes=int(0.99 * even))
        assert not pack_swap_pays(latency, job, num_bytes=int(1.01 * even))


def test_an_engine_begins_a_pack_again_where_copies_take_longer():
    engine = make_engine(
        num_pages=300, num_host_pages=300, hardware=replace(FAST, host_bytes_per_s=1.0)
    )
    engine.policy = random_policy(0)
    job = engine.job(submit(engine))
    while job.phase != "backward":
        engine.step()
    engine.pause_job(job.id)
    assert (
        job.progress.num_drops == 1
        and job.progress.swapped is None
        and engine.stats().num_swapped_out == 0
    )
