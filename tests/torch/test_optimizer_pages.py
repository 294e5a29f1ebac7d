"""Moments of optimizers lie in pages of the pool: the same numbers, bit for bit, wherever they go
from there."""

from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    FAST,
    assert_nothing_is_held,
    drain,
    examples_of,
    greedy,
    make_engine,
    prompts_of,
    watched,
)
from safetensors.torch import load_file
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.messages.jobs import PlaceOptimizer
from coserve.devices.torch.adapter_memory import AdapterMemory
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.errors import BudgetError, JobError
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

LORA = LoraConfig(r=3, target_modules="all-linear", dropout=0.2)
CONFIG = TuningConfig(
    num_epochs=3,
    batch_size=3,
    max_pack_tokens=20,
    seed=4,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
LARGE, SMALL = 2000, 60  # pages: with room for the moments, and with none beside a pack


def submit(engine: Engine, **named: Any) -> Any:
    named = {"adapter": LORA, "name": "mine", **named}
    return engine.job(
        engine.submit_examples(examples_of((9, 14, 5, 20, 11, 7, 3)), CONFIG, **named)
    )


def num_pages(engine: Engine) -> int:
    return engine.pool.num_pages_by_owner().get("optimizer", 0)


def expected_pages(engine: Engine, job: Any) -> int:
    return -(-job.costs.optimizer_bytes // engine.pool.page_bytes)


def moves(engine: Engine) -> list[int]:
    return [each.num_pages for each in watched(engine).commands if isinstance(each, PlaceOptimizer)]


def run(engine: Engine) -> list[Any]:
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    return events


def result(engine: Engine, directory: Any) -> dict[str, torch.Tensor]:
    engine.save_adapter("mine", directory)
    return load_file(directory / "adapter_model.safetensors")


def assert_same(engine: Engine, undisturbed: dict[str, torch.Tensor], directory: Any) -> None:
    ours = result(engine, directory)
    assert all(torch.equal(ours[name], undisturbed[name]) for name in undisturbed)
    assert not num_pages(engine)
    assert_nothing_is_held(engine)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Return the result of a job whose moments lay beside the pool."""
    engine = make_engine(num_pages=SMALL, deterministic=True)
    submit(engine)
    run(engine)
    assert not moves(engine)
    return result(engine, tmp_path_factory.mktemp("undisturbed"))


def test_a_job_has_pages_for_its_moments_from_start_to_end(undisturbed, tmp_path):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    assert num_pages(engine) == expected_pages(engine, job) > 0
    while not job.is_terminal:
        assert num_pages(engine) == expected_pages(engine, job)
        engine.step()
        engine.check_integrity()
    assert job.state == "succeeded" and len(moves(engine)) == 1
    assert_same(engine, undisturbed, tmp_path)


@pytest.mark.parametrize("is_paused", [False, True])
def test_pages_are_free_after_a_job_is_cancelled(is_paused):
    engine = make_engine(num_pages=LARGE, num_host_pages=LARGE)
    job = submit(engine)
    while job.num_steps_done < 2:
        engine.step()
    if is_paused:
        engine.pause_job(job.id)
    engine.cancel_job(job.id)
    assert not num_pages(engine)
    assert_nothing_is_held(engine)


def test_a_paused_job_gives_its_pages_back_where_its_moments_go_to_the_host(undisturbed, tmp_path):
    bus = replace(FAST, host_bytes_per_s=1e15)
    engine = make_engine(num_pages=LARGE, num_host_pages=LARGE, hardware=bus, deterministic=True)
    job = submit(engine)
    while job.num_steps_done < 3:
        engine.step()
    engine.pause_job(job.id)
    assert job.optimizer_away and not num_pages(engine)
    engine.check_integrity()
    engine.resume_job(job.id)
    engine.step()
    assert num_pages(engine) == expected_pages(engine, job)
    run(engine)
    assert_same(engine, undisturbed, tmp_path)


def test_requests_take_the_pages_and_the_job_continues(undisturbed, tmp_path):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    while job.num_steps_done < 2:
        engine.step()
    assert engine.stats().num_pages_for_requests == engine.pool.num_pages
    held = engine.cache.take(engine.cache.num_available)  # as requests would that need every page
    assert not num_pages(engine)
    engine.cache.give_back(held)
    while job.num_steps_done < 3:
        engine.step()
    drain(engine)
    engine.step()
    run(engine)
    assert 0 in moves(engine) and moves(engine)[-1] == expected_pages(engine, job), "they come back"
    assert_same(engine, undisturbed, tmp_path)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("seed", range(2))
def test_a_caller_may_be_interrupted_while_moments_move(seed, after, undisturbed, tmp_path):
    engine, rng = make_engine(num_pages=LARGE, deterministic=True), Random(seed)
    inner = watched(engine).inner
    execute = inner.execute

    def call(command: Any) -> Any:
        # Interrupted in a step with its update, the job fails: whether that was made is not known.
        fails = isinstance(command, PlaceOptimizer) and not job.update_due and rng.random() < 0.5
        if fails and not after:
            raise KeyboardInterrupt
        reply = execute(command)
        if fails:
            raise KeyboardInterrupt
        return reply

    job = submit(engine)
    inner.execute = call  # type: ignore[method-assign]
    while not job.is_terminal:
        with suppress(KeyboardInterrupt):
            if rng.random() < 0.2 and not engine.has_requests:
                engine.cache.optimizers.lend(1)
                engine.add(prompts_of([rng.randint(5, 50)])[0], greedy(3))
            engine.step()
        engine.check_integrity()
    inner.execute = execute  # type: ignore[method-assign]
    drain(engine)
    assert_same(engine, undisturbed, tmp_path)


def test_a_checkpoint_is_the_same_from_pages_as_from_beside_them(tmp_path):
    states = []
    for pages in (SMALL, LARGE):
        engine = make_engine(num_pages=pages, deterministic=True)
        job = submit(engine)
        while job.num_steps_done < 3:
            engine.step()
        assert bool(num_pages(engine)) == (pages == LARGE)
        states.append(
            load_file(
                engine.checkpoint(job.id).write(tmp_path / str(pages)) / "optimizer.safetensors"
            )
        )
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    other = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(other, adapter=None, checkpoint=next((tmp_path / str(SMALL)).iterdir()))
    assert num_pages(other) == expected_pages(other, job)
    run(other)
    assert job.state == "succeeded"


def test_a_modelled_device_has_the_same_pages():
    backbone = make_backbone()
    device = ModelledDevice(
        backbone, roofline_profile(backbone, FAST), num_pages=LARGE, block_tokens=BLOCK
    )
    engine = Engine(device, EngineConfig(block_tokens=BLOCK, tpot_s=1.0), end_tokens=())
    real = make_engine(num_pages=LARGE)
    assert submit(engine).costs.optimizer_bytes == submit(real).costs.optimizer_bytes
    assert num_pages(engine) == num_pages(real) > 0
    run(engine)
    assert not num_pages(engine)


def test_a_paused_job_gives_its_pages_back_also_without_a_host(undisturbed, tmp_path):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    while job.num_steps_done < 3:
        engine.step()
    engine.pause_job(job.id)
    assert not num_pages(engine) and not job.optimizer_away
    engine.check_integrity()
    engine.resume_job(job.id)
    while job.num_steps_done < 4:
        engine.step()
    engine.step()
    assert num_pages(engine) == expected_pages(engine, job)
    run(engine)
    assert_same(engine, undisturbed, tmp_path)


@pytest.fixture
def short_of_memory(monkeypatch):
    """Devices without memory for moments beside the pool."""
    monkeypatch.setattr(
        AdapterMemory, "moments_need_pages", lambda self, num_parameters, num_more=0: True
    )


def step_until(engine: Engine, condition: Any) -> None:
    while not condition():
        engine.step()
        engine.check_integrity()


def test_a_job_that_needs_pages_for_its_moments_has_them_with_each_pack(
    short_of_memory, undisturbed, tmp_path
):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    step_until(engine, lambda: job.has_pack and job.num_steps_done)
    size = expected_pages(engine, job)
    assert num_pages(engine) == size
    with pytest.raises(BudgetError):
        engine.cache.take(engine.cache.num_available + 1)
    assert engine.stats().num_pages_for_requests == engine.pool.num_pages, (
        "the pack makes room, and they do"
    )
    step_until(engine, lambda: job.num_steps_done == 3)
    run(engine)
    assert 0 not in moves(engine)
    assert_same(engine, undisturbed, tmp_path)


def test_a_job_without_the_pages_that_it_needs_waits_for_them(
    short_of_memory, undisturbed, tmp_path
):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    step_until(engine, lambda: job.num_steps_done == 2 and not job.has_pack)
    held = engine.cache.take(
        engine.cache.num_available - 20
    )  # a pack would fit into the others, and they do not
    assert not num_pages(engine)
    for _ in range(20):
        engine.step()
    assert job.state == "running" and not job.has_pack and job.num_steps_done == 2
    checkpoint = load_file(
        engine.checkpoint(job.id).write(tmp_path / "from-the-host") / "optimizer.safetensors"
    )
    engine.cache.give_back(held)
    step_until(engine, lambda: job.num_steps_done == 3)
    assert num_pages(engine) == expected_pages(engine, job)
    run(engine)
    assert_same(engine, undisturbed, tmp_path)

    other = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(other)
    step_until(other, lambda: job.num_steps_done == 2 and not job.has_pack)
    from_pages = load_file(
        other.checkpoint(job.id).write(tmp_path / "from-pages") / "optimizer.safetensors"
    )
    assert from_pages.keys() == checkpoint.keys()
    assert all(torch.equal(from_pages[name], checkpoint[name]) for name in checkpoint)


def test_an_optimizer_step_that_is_due_waits_for_pages_after_a_pause(
    short_of_memory, undisturbed, tmp_path
):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    step_until(engine, lambda: job.num_steps_done == 2 and job.update_due)
    with pytest.raises(BudgetError):
        engine.cache.take(engine.cache.num_available + 1)
    engine.pause_job(job.id)
    held = engine.cache.take(engine.cache.num_available - 1)
    engine.resume_job(job.id)
    for _ in range(20):
        engine.step()
    assert job.update_due and job.num_steps_done == 2
    engine.cache.give_back(held)
    step_until(engine, lambda: job.num_steps_done == 3)
    run(engine)
    assert_same(engine, undisturbed, tmp_path)


def test_jobs_that_need_more_pages_than_there_are_take_turns(
    short_of_memory, undisturbed, tmp_path
):
    engine = make_engine(num_pages=LARGE, deterministic=True)
    job = submit(engine)
    size, pack_size = expected_pages(engine, job), 0
    while not job.is_terminal:
        engine.step()
        pack_size = max(pack_size, engine.pool.num_pages_by_owner().get("activations", 0))
    engine = make_engine(num_pages=2 * size + pack_size - 1, deterministic=True)
    jobs = [submit(engine), submit(engine, name="other")]
    run(engine)
    assert [job.state for job in jobs] == ["succeeded", "succeeded"]
    assert_same(engine, undisturbed, tmp_path)


def test_a_job_whose_moments_find_no_pages_at_all_is_refused(short_of_memory):
    size = expected_pages(engine := make_engine(num_pages=LARGE), submit(engine))
    engine = make_engine(num_pages=size)
    with pytest.raises(
        JobError, match=r"its optimizer's moments take [\d,]+ bytes, more than the page pool has"
    ):
        submit(engine)
    assert_nothing_is_held(engine)


def test_a_paused_job_that_needs_pages_has_its_moments_on_the_host_without_slots(
    short_of_memory, undisturbed, tmp_path
):
    bus = replace(FAST, host_bytes_per_s=1e15)
    engine = make_engine(num_pages=LARGE, num_host_pages=LARGE, hardware=bus, deterministic=True)
    job = submit(engine)
    step_until(engine, lambda: job.num_steps_done == 2)
    before = load_file(
        engine.checkpoint(job.id).write(tmp_path / "before") / "optimizer.safetensors"
    )
    engine.pause_job(job.id)
    assert not (job.optimizer_away or num_pages(engine))
    paused = load_file(
        engine.checkpoint(job.id).write(tmp_path / "paused") / "optimizer.safetensors"
    )
    assert all(torch.equal(before[name], paused[name]) for name in before)
    engine.resume_job(job.id)
    run(engine)
    assert_same(engine, undisturbed, tmp_path)


def test_moments_that_fit_beside_the_pool_forget_no_prefixes():
    engine = make_engine(num_pages=110)
    for prompt in prompts_of([100] * 4):
        engine.add(prompt, greedy(2))
    drain(engine)
    kept = engine.cache.prefixes.num_evictable
    submit(engine)
    assert not num_pages(engine) and engine.cache.prefixes.num_evictable == kept > 20
