"""Several jobs at once through one backbone: who runs with whom, and that each learns what it
learns alone."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from engines import examples_of, make_engine, watched
from safetensors.torch import load_file

from coserve.adapters import LoraConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.simulate.hardware import Hardware
from coserve.tuning.config import OptimizerConfig, TuningConfig

# The weights' way from memory is what few rows cost, so that jobs are fused.
MEMORY_BOUND = Hardware(name="memory-bound", flops_per_s=1e15, bytes_per_s=1e8, call_s=1e-6)
CONFIG = TuningConfig(
    num_epochs=2, batch_size=2, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3)
)
ADAPTERS = {
    "a": LoraConfig(r=3, alpha=6, target_modules="all-linear"),
    "b": LoraConfig(r=3, alpha=6, target_modules="all-linear", dropout=0.2),
    "c": LoraConfig(r=2, target_modules=("q_proj", "v_proj")),
    "d": LoraConfig(r=3, alpha=6, target_modules="all-linear"),
    "e": LoraConfig(r=5, target_modules=r".*layers\.[12]\..*down_proj"),
}
LENGTHS = {
    "a": (9, 14, 5, 20),
    "b": (7, 7, 3),
    "c": (12, 2, 9, 4),
    "d": (9, 14, 5, 20),
    "e": (30, 8),
}


def submit(engine: Engine, name: str, **changed: Any) -> str:
    config = replace(CONFIG, seed=ord(name), **changed)
    return engine.submit_examples(
        examples_of(LENGTHS[name], seed=ord(name)), config, adapter=ADAPTERS[name], name=name
    )


def losses_of(events: list[Any], job: str) -> list[float]:
    return [
        each.loss
        for each in events
        if isinstance(each, JobEvent) and each.kind == "step" and each.job == job
    ]


def run(engine: Engine) -> list[Any]:
    events: list[Any] = []
    while any(job.state == "running" for job in engine.jobs.values()):
        events += engine.step()
        engine.check_integrity()
    return events + engine.step()


def result(engine: Engine, name: str, directory: Any) -> dict[str, Any]:
    engine.save_adapter(name, directory / f"{name}-{id(engine)}")
    return load_file(directory / f"{name}-{id(engine)}" / "adapter_model.safetensors")


def assert_alone(engine: Engine, ids: dict[str, str], events: list[Any], directory: Any) -> None:
    """Each of these jobs learned what it learns alone."""
    for name, job in ids.items():
        lonely = make_engine(hardware=MEMORY_BOUND, policy="tuning-only")
        alone = losses_of(own := run_alone(lonely, name), next(iter(lonely.jobs)))
        assert own and losses_of(events, job) == pytest.approx(alone, rel=1e-6)
        theirs = result(lonely, name, directory)
        for key, ours in result(engine, name, directory).items():
            assert float((ours - theirs[key]).abs().max()) < 1e-6, (name, key)


def run_alone(engine: Engine, name: str) -> list[Any]:
    submit(engine, name)
    return run(engine)


def groups_of(engine: Engine) -> set[frozenset[str]]:
    """Jobs that were in one group of tasklets in some step."""
    found = set()
    for batch in watched(engine).batches:
        for group in {part.group for part in batch.tasklets if part.group is not None}:
            found.add(frozenset(part.job for part in batch.tasklets if part.group == group))
    return found


@pytest.mark.parametrize("policy", ["tuning-only", "slack", "vtc"])
def test_jobs_at_once_learn_what_each_learns_alone(policy, tmp_path):
    engine = make_engine(hardware=MEMORY_BOUND, policy=policy, ttft_s=100.0)
    ids = {name: submit(engine, name) for name in ADAPTERS}
    events: list[Any] = []
    seen: set[tuple[str, ...]] = set()
    while any(job.state == "running" for job in engine.jobs.values()):
        events += engine.step()
        seen.update(engine.stats().joined_jobs)
    assert max(map(len, groups_of(engine))) == 5 and tuple(sorted(ids.values())) in seen
    assert engine.stats().joined_jobs == ()
    assert_alone(engine, ids, events, tmp_path)


def test_jobs_that_begin_at_any_time_meet_and_none_keeps_another_waiting(tmp_path):
    engine = make_engine(hardware=MEMORY_BOUND, policy="tuning-only")
    ids, events = {}, []
    for name in ADAPTERS:
        ids[name] = submit(engine, name)
        for _ in range(2):
            events += engine.step()
    events += run(engine)
    assert max(map(len, groups_of(engine))) >= 3
    assert_alone(engine, ids, events, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_pausing_cancelling_and_failing_jobs_leave_the_others_as_they_are(seed, tmp_path):
    rng = Random(seed)
    engine = make_engine(hardware=MEMORY_BOUND, policy="tuning-only")
    ids = {name: submit(engine, name) for name in ("a", "c", "e")}
    bad = submit(engine, "b", optimizer=OptimizerConfig(learning_rate=1e30))  # soon not finite
    other = submit(engine, "d")
    events: list[Any] = []
    for _ in range(rng.randint(3, 8)):
        events += engine.step()
    engine.pause_job(ids["c"])
    engine.cancel_job(other)
    for _ in range(rng.randint(1, 5)):
        events += engine.step()
    engine.resume_job(ids["c"])
    events += run(engine)
    assert engine.job(other).state == "cancelled" and engine.job(bad).is_terminal
    assert_alone(engine, ids, events, tmp_path)


def test_with_deterministic_company_changes_no_bit(tmp_path):
    engine, alone = (
        make_engine(hardware=MEMORY_BOUND, policy="tuning-only", deterministic=True)
        for _ in range(2)
    )
    ids = {name: submit(engine, name) for name in ADAPTERS}
    events = run(engine)
    assert groups_of(engine), "plans do not know of it"
    for name, job in ids.items():
        events_alone = run_alone(alone, name)
        assert losses_of(events, job) == losses_of(events_alone, next(reversed(list(alone.jobs))))
        theirs = result(alone, name, tmp_path)
        assert all(
            bool((ours == theirs[key]).all())
            for key, ours in result(engine, name, tmp_path).items()
        )
