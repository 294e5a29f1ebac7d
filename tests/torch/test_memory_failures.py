"""A device that runs out of memory again and again: requests are served, jobs get on where they
can, or fail."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from engines import (
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
)

from coserve.adapters import LoraConfig
from coserve.devices.messages.jobs import BeginPack
from coserve.devices.messages.steps import StepBatch, StepFailure
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.lifecycle import largest_pieces
from coserve.engine.outbox import Event
from coserve.errors import DeviceMemoryError, JobError
from coserve.tuning.config import TuningConfig

LORA = LoraConfig(r=2, target_modules="all-linear")
MOST_STEPS = 5000


def fail_where(engine: Engine, fails: Callable[[StepBatch], bool]) -> None:
    watched(engine).fail = lambda batch: StepFailure(message="full up") if fails(batch) else None


def largest(batch: StepBatch, job: str) -> int:
    """Rows of the largest piece of a job in a step; 0 if it has none."""
    return largest_pieces(batch).get(job, 0)


def run_until_over(engine: Engine, *jobs: str) -> list[Event]:
    events: list[Event] = []
    for _ in range(MOST_STEPS):
        if all(engine.jobs[job].is_terminal for job in jobs):
            return events + engine.step()
        events += engine.step()
        engine.check_integrity()
    raise AssertionError(f"jobs are left after {MOST_STEPS} steps: {engine.stats()}")


def test_a_pack_that_never_fits_starves_no_request_and_its_job_fails_with_the_reason():
    engine = make_engine()
    fail_where(engine, lambda batch: bool(batch.windows))
    job = engine.submit(examples_of((20, 9)), adapter=LORA)
    prompts = prompts_of((9, 5))
    asked = {engine.add(prompt, greedy(30)): prompt for prompt in prompts}
    events = drain(engine, most_steps=60)
    got = tokens_by_request(events)
    assert {name: got[name] for name in asked} == {
        name: expected_tokens(each, 30) for name, each in asked.items()
    }
    events += run_until_over(engine, job)
    (failed,) = [
        event for event in events if isinstance(event, JobEvent) and event.kind == "failed"
    ]
    assert failed.message.startswith(
        "the device ran out of memory 10 times in a row in the same pack: full up; lower "
    )
    assert engine.stats().num_packs_dropped == 10
    assert engine.pool.num_free == engine.pool.num_pages - engine.cache.prefixes.num_evictable
    with pytest.raises(JobError, match="10 times in a row in the same pack: full up"):
        engine.tune(examples_of((20, 9)), adapter=LORA)


@pytest.mark.long
def test_between_two_failures_there_are_twice_as_many_steps_without_the_job():
    engine = make_engine()
    fail_where(engine, lambda batch: bool(batch.windows))
    job = engine.submit(examples_of((20, 9)), adapter=LORA)
    while not engine.jobs[job].is_terminal:
        if not engine.has_requests:
            engine.add(prompts_of((5,))[0], greedy(30))
        engine.step()
    tried = [number for number, batch in enumerate(watched(engine).batches) if batch.windows]
    assert [later - earlier - 1 for earlier, later in pairwise(tried)] == [
        2**number for number in range(9)
    ]


def test_a_job_gets_on_in_pieces_that_there_is_memory_for():
    engine = make_engine()
    job = engine.submit(examples_of((40, 30, 25)), TuningConfig(num_epochs=2), adapter=LORA)
    fail_where(engine, lambda batch: largest(batch, job) > 6)
    run_until_over(engine, job)
    assert engine.jobs[job].state == "succeeded"
    assert max(largest(batch, job) for batch in watched(engine).batches[-8:]) > 1, (
        "no smaller than they have to be"
    )


@pytest.mark.long
def test_pieces_are_as_large_as_before_once_there_is_memory_again():
    engine = make_engine()
    job = engine.submit(examples_of((40,)), TuningConfig(num_epochs=60), adapter=LORA)
    device = watched(engine)
    fail_where(engine, lambda batch: len(device.batches) <= 20 and largest(batch, job) > 3)
    run_until_over(engine, job)
    assert engine.jobs[job].state == "succeeded"
    assert (
        largest(device.batches[0], job)
        == max(largest(batch, job) for batch in device.batches[-6:])
        == 40
    )


def test_a_job_whose_packs_never_fit_takes_no_other_with_it():
    engine = make_engine()
    bad = engine.submit(examples_of((20, 9)), adapter=LORA)
    good = [
        engine.submit(
            examples_of((20, 9), seed),
            TuningConfig(num_epochs=30, max_pack_tokens=20),
            adapter=LORA,
        )
        for seed in (1, 2)
    ]
    fail_where(engine, lambda batch: largest(batch, bad) > 0)
    run_until_over(engine, bad, *good)
    assert engine.jobs[bad].state == "failed"
    assert [engine.jobs[job].state for job in good] == ["succeeded", "succeeded"]


def test_a_pack_that_cannot_even_begin_fails_its_job_too(monkeypatch):
    engine = make_engine()
    execute = engine.device.execute

    def refuse(command):
        if isinstance(command, BeginPack):
            raise DeviceMemoryError("no room beside the pages")
        return execute(command)

    monkeypatch.setattr(engine.device, "execute", refuse)
    job = engine.submit(examples_of((20, 9)), adapter=LORA)
    (prompt,) = prompts_of((9,))
    assert engine.generate([prompt], greedy(8))[0].tokens == expected_tokens(prompt, 8)
    run_until_over(engine, job)
    assert engine.jobs[job].state == "failed"
    assert "10 times in a row in the same pack: no room beside the pages" in (
        engine.jobs[job].error or ""
    )
    assert engine.pool.num_free == engine.pool.num_pages - engine.cache.prefixes.num_evictable
