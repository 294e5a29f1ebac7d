"""Ctrl-C, an error or another call in the middle of a step: the engine is as good as before."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from engines import (
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
from safetensors.torch import load_file
from support import RaisingMode

from coserve.adapters import LoraConfig
from coserve.devices.messages.commands import DropVersion, OpenVersion
from coserve.devices.messages.jobs import (
    BeginPack,
    CloseTrainer,
    CombineContributions,
    DropCheckpoint,
    DropPack,
    DropTrainer,
    OpenTrainer,
    PublishVersion,
    ReadContributions,
    TakeCheckpoint,
    TakeContribution,
)
from coserve.devices.messages.steps import StepFailure
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.engine.request import Chunk
from coserve.errors import DeviceGoneError, DeviceMemoryError
from coserve.tuning.config import TuningConfig
from coserve.tuning.shard import Combination, Shard

LORA = LoraConfig(r=2, target_modules="all-linear", dropout=0.2)
# Packs of an example or two, four optimizer steps.
CONFIG = TuningConfig(num_epochs=2, batch_size=3, max_pack_tokens=20, seed=4)
LENGTHS = (9, 14, 5, 20, 11, 7)
PUBLISHED = replace(CONFIG, publish_every_steps=1, evaluate_every_steps=1)


def parameters(engine: Engine, label: str, directory: Any) -> dict[str, Any]:
    engine.save_adapter(label, directory)
    return load_file(directory / "adapter_model.safetensors")


def drive(engine: Engine) -> None:
    for _ in range(100):
        engine.step()


def assert_answers(engine: Engine, length: int = 9) -> None:
    (prompt,) = prompts_of((length,))
    assert engine.generate([prompt], greedy(8))[0].tokens == expected_tokens(prompt, 8)


@pytest.mark.parametrize("num_calls", [1, 30, 200, 1000])
def test_an_engine_that_was_interrupted_while_its_device_worked_answers_as_before(num_calls):
    engine = make_engine()
    prompts = prompts_of((9, 14, 5))
    asked = {engine.add(prompt, greedy(20)): prompt for prompt in prompts}
    with pytest.raises(KeyboardInterrupt), RaisingMode(KeyboardInterrupt(), num_calls):
        engine.generate(prompts_of((7, 6), 50), greedy(20))
    assert set(asked) == {request.request for request in engine.requests}
    engine.check_integrity()
    assert_answers(engine)
    got = tokens_by_request(drain(engine))
    assert {name: got[name] for name in asked} == {
        name: expected_tokens(each, 20) for name, each in asked.items()
    }
    assert_nothing_is_held(engine)


def interrupted_once(
    engine: Engine, method: str, at: Callable[[Any], bool], *, after: bool
) -> list[Any]:
    """Have a method of the device interrupted, before or after it has done its work; returns the
    steps where it was."""
    inner = watched(engine).inner
    found: list[Any] = []
    work = getattr(inner, method)

    def call(*args: Any) -> Any:
        batch = watched(engine).batches[-1]
        if found or not at(batch):
            return work(*args)
        found.append(batch)
        if after:
            work(*args)
        raise KeyboardInterrupt

    setattr(inner, method, call)
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["submit", "collect"])
@pytest.mark.parametrize("piece", long_but("tasklets", of=["windows", "losses", "tasklets"]))
def test_a_job_makes_the_same_adapter_wherever_a_step_of_its_packs_was_interrupted(
    method, piece, after, tmp_path
):
    """Also where the pack was done in that step, so that its gradients had been computed."""
    plain = make_engine()
    plain.tune(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")
    engine = make_engine()
    request = engine.add(prompts_of((9,))[0], greedy(30))
    events: list[Any] = engine.step()
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")
    found = interrupted_once(engine, method, lambda batch: bool(getattr(batch, piece)), after=after)
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            events += engine.step()
        engine.check_integrity()
    assert len(found) == 1
    assert engine.jobs[job].state == "succeeded"
    ours, theirs = (
        parameters(engine, "mine", tmp_path / "ours"),
        parameters(plain, "mine", tmp_path / "theirs"),
    )
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-6
    assert tokens_by_request(events)[request] == expected_tokens(prompts_of((9,))[0], 30)


def test_a_token_that_nobody_heard_of_does_not_count_as_used():
    """Where tokens weigh less the more they were used, and the caller was interrupted when one had
    been chosen."""
    (prompt,) = prompts_of((9,))
    params = greedy(20, repetition_penalty=1.5, frequency_penalty=1.0)
    plain = make_engine().generate([prompt], params)[0].tokens
    engine = make_engine()
    one = engine.add(prompt, params)
    found = interrupted_once(
        engine, "collect", lambda batch: len(watched(engine).batches) == 5, after=True
    )
    events: list[Any] = []
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            events += engine.step()
    assert len(found) == 1
    assert tokens_by_request(events)[one] == plain


MAKES: dict[type, tuple[type, str]] = {
    OpenVersion: (DropVersion, "version"),
    PublishVersion: (DropVersion, "version"),
    OpenTrainer: (DropTrainer, "job"),
    TakeCheckpoint: (DropCheckpoint, "checkpoint"),
}


def left_over(done: list[Any]) -> set[str]:
    """What these commands have made, and not dropped."""
    found: set[str] = set()
    for command in done:
        for made, (dropped, name) in MAKES.items():
            if isinstance(command, made):
                found.add(f"{name} {getattr(command, name)}")
            elif isinstance(command, dropped):
                found.discard(f"{name} {getattr(command, name)}")
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    engine = make_engine()
    engine.tune(
        examples_of(LENGTHS), PUBLISHED, adapter=LORA, validation=examples_of((4, 8)), name="mine"
    )
    return parameters(engine, "mine", tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("after", long_but(True, of=[False, True]), ids=["before", "after"])
@pytest.mark.parametrize(
    "kind",
    [*MAKES, BeginPack, DropPack, CloseTrainer, DropTrainer, DropVersion],
    ids=lambda kind: kind.__name__,
)
def test_a_caller_may_be_interrupted_in_any_command(kind, after, undisturbed, tmp_path):
    """Nothing is lost or made twice, and nothing stays on the device."""
    engine = make_engine()
    inner, done = watched(engine).inner, []
    execute, left = inner.execute, iter([True])

    def call(command):
        interrupted = isinstance(command, kind) and next(left, False)
        if interrupted and not after:
            raise KeyboardInterrupt
        reply = execute(command)
        done.append(command)
        if interrupted:
            raise KeyboardInterrupt
        return reply

    inner.execute = call  # type: ignore[method-assign]

    def until_done(do: Callable[..., Any], *args: Any, **named: Any) -> Any:
        while True:
            with suppress(KeyboardInterrupt):
                return do(*args, **named)

    until_done(engine.load_adapter, "read", adapter_directory())
    validation = examples_of((4, 8))
    submitted: dict[str, Any] = {
        "adapter": LORA,
        "validation": validation,
        "name": "mine",
        "job_id": "x",
    }
    until_done(engine.submit_examples, examples_of(LENGTHS), PUBLISHED, **submitted)
    while not engine.jobs["x"].is_terminal:
        until_done(engine.step)
        engine.check_integrity()
        if engine.jobs["x"].has_pack and engine.num_steps % 3 == 0:
            until_done(engine.pause_job, "x")
            until_done(engine.checkpoint, "x")
            until_done(engine.resume_job, "x")
    assert engine.jobs["x"].state == "succeeded"
    assert engine.versions.labels() == ["read@0", *(f"mine@{step + 1}" for step in range(4))]
    ours = parameters(engine, "mine", tmp_path)
    assert max(float((ours[name] - undisturbed[name]).abs().max()) for name in undisturbed) < 1e-6
    for do, name in (
        (engine.forget_job, "x"),
        (engine.unload_adapter, "read"),
        (engine.unload_adapter, "mine"),
    ):
        with suppress(KeyboardInterrupt):
            do(name)
    assert not engine.jobs and not engine.versions.labels()
    until_done(engine.flush_commands)
    assert left_over(done) == set()
    assert sum(isinstance(command, kind) for command in done) >= 1


def test_a_job_whose_caller_was_interrupted_before_the_device_opened_it_is_not_opened_later():
    """Opening takes long, and full fine-tuning would have the device refuse all adapters from then
    on."""
    engine = make_engine()
    inner, done = watched(engine).inner, []
    execute, left = inner.execute, iter([True])

    def call(command: Any) -> Any:
        if isinstance(command, OpenTrainer) and next(left, False):
            raise KeyboardInterrupt
        done.append(type(command))
        return execute(command)

    inner.execute = call  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine")
    engine.flush_commands()
    assert DropTrainer in done and OpenTrainer not in done


def shared_job(
    directory: Path,
    kind: type | None = None,
    *,
    after: bool = False,
    error: BaseException | None = None,
    num_asked: int = 1,
    synchronization: Literal["synchronous", "local-sgd"] = "synchronous",
) -> dict[str, Any]:
    """Train one node's part of a job, which gets its own contribution twice; a command may be hit
    by an error once."""
    engine = make_engine()
    inner, left = watched(engine).inner, iter([True] if kind else [])
    execute = inner.execute

    def call(command: Any) -> Any:
        interrupted = kind is not None and isinstance(command, kind) and next(left, False)
        reply = execute(command) if after or not interrupted else None
        if interrupted:
            raise error or KeyboardInterrupt
        return reply

    def until_done(do: Callable[..., Any], *args: Any) -> Any:
        while True:
            with suppress(KeyboardInterrupt, DeviceMemoryError):
                return do(*args)

    inner.execute = call  # type: ignore[method-assign]
    shard = Shard(
        job="x",
        index=0,
        count=2,
        synchronization=synchronization,
        every_steps=1
        if synchronization == "synchronous"
        else 1000,  # then only after the last step
        meet_every_steps=0,
        directory=str(directory),
    )
    job = engine.submit_examples(
        examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", job_id="x.0", shard=shard
    )
    while not engine.jobs[job].is_terminal:
        until_done(engine.step)
        exchange = engine.jobs[job].exchange
        assert exchange is not None
        if exchange.is_waiting and exchange.combination is None:
            written = directory / f"{engine.jobs[job].num_steps_done}"
            written.mkdir(parents=True)
            for _ in range(num_asked - 1):
                until_done(engine.contribution, job)
            until_done(engine.contribution, job).write(written)
            engine.device.execute(ReadContributions(job, (str(written),) * 2))
            until_done(
                engine.combine, job, Combination(directories=(str(written),) * 2, num_trained=20)
            )
    assert engine.jobs[job].state == "succeeded" and next(left, None) is None
    if synchronization == "local-sgd":
        exchange = engine.jobs[job].exchange
        assert exchange is not None and exchange.common is not None
        assert exchange.common.position.num_steps_done == engine.jobs[job].num_steps_done
    return parameters(engine, "mine", directory / "saved")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "kind", [TakeContribution, CombineContributions], ids=lambda kind: kind.__name__
)
def test_gradients_of_a_shared_job_are_given_and_taken_once_where_a_caller_is_interrupted(
    kind, after, tmp_path
):
    plain = shared_job(tmp_path / "plain")
    ours = shared_job(tmp_path / "interrupted", kind, after=after)
    assert max(float((ours[name] - plain[name]).abs().max()) for name in plain) < 1e-6


@pytest.mark.parametrize(
    "kind", [TakeContribution, CombineContributions], ids=lambda kind: kind.__name__
)
def test_no_gradients_of_a_shared_job_are_lost_where_there_is_no_memory_for_a_moment(
    kind, tmp_path
):
    plain = shared_job(tmp_path / "plain")
    ours = shared_job(tmp_path / "failed", kind, error=DeviceMemoryError("full"))
    assert max(float((ours[name] - plain[name]).abs().max()) for name in plain) < 1e-6


def test_a_node_has_what_all_hold_where_there_was_no_memory_for_a_copy_of_it_for_a_moment(tmp_path):
    plain = shared_job(tmp_path / "plain", synchronization="local-sgd")
    ours = shared_job(
        tmp_path / "failed",
        TakeCheckpoint,
        error=DeviceMemoryError("full"),
        synchronization="local-sgd",
    )
    assert max(float((ours[name] - plain[name]).abs().max()) for name in plain) < 1e-6


def test_who_asks_again_for_a_contribution_gets_the_same_one(tmp_path):
    """It may have been interrupted at any moment before it had it."""
    plain = shared_job(tmp_path / "plain")
    ours = shared_job(tmp_path / "twice", num_asked=2)
    assert max(float((ours[name] - plain[name]).abs().max()) for name in plain) < 1e-6


def test_a_caller_may_be_interrupted_while_a_live_job_that_resumes_is_served_again(tmp_path):
    live = replace(CONFIG, live=True)
    first = make_engine()
    job = first.submit_examples(examples_of(LENGTHS), live, adapter=LORA, name="live")
    while first.jobs[job].num_steps_done < 2:
        first.step()
    resumed, written = make_engine(), str(first.checkpoint(job).write(tmp_path))
    inner = watched(resumed).inner
    execute, left = inner.execute, iter([True])

    def call(command):
        if isinstance(command, PublishVersion) and next(left, False):
            raise KeyboardInterrupt
        return execute(command)

    inner.execute = call  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        resumed.submit_examples(
            examples_of(LENGTHS), live, adapter=LORA, name="live", job_id="x", checkpoint=written
        )
    while not resumed.jobs["x"].is_terminal:
        resumed.step()
        resumed.check_integrity()
    assert resumed.versions.labels() == ["live@4"]
    assert_nothing_is_held(resumed)


def test_an_error_where_a_step_should_begin_loses_no_command(monkeypatch):
    """The device had not even been told which requests there are."""
    engine = make_engine()
    (prompt,) = prompts_of((9,))
    one = engine.add(prompt, greedy(8))
    with monkeypatch.context() as patch:

        def refuse(batch):
            raise RuntimeError("not now")

        patch.setattr(watched(engine).inner, "submit", refuse)
        with pytest.raises(RuntimeError, match="not now"):
            engine.step()
    assert tokens_by_request(drain(engine))[one] == expected_tokens(prompt, 8)
    assert_nothing_is_held(engine)


def test_jobs_are_told_apart_from_a_device_that_is_gone():
    """All jobs of the step are accounted for, and the first error is the one that is raised."""
    engine = make_engine()
    jobs = [engine.submit(examples_of((9,), seed), adapter=LORA) for seed in (0, 1)]
    inner = watched(engine).inner
    collect, execute = inner.collect, inner.execute
    gone: list[str] = []

    def die() -> Any:
        result = collect()
        if len(watched(engine).batches[-1].updates) == 2:
            gone.append("yes")
            raise DeviceGoneError("the first error")
        return result

    def fail(command: Any) -> Any:
        if gone:
            raise DeviceGoneError("an error that follows from it")
        return execute(command)

    inner.collect, inner.execute = die, fail  # type: ignore[method-assign]
    with pytest.raises(DeviceGoneError, match="the first error"):
        drive(engine)
    assert [engine.jobs[job].state for job in jobs] == ["failed", "failed"]
    ends = [
        event for event in engine.step() if isinstance(event, JobEvent) and event.kind == "failed"
    ]
    assert {event.job for event in ends} == set(jobs)
    assert all("the first error" in event.message for event in ends)
    assert engine.pool.num_free == engine.pool.num_pages


# -- between the two halves of a step -------------------------------------------------------


def test_requests_come_and_end_while_a_step_runs():
    engine = make_engine()
    prompts = prompts_of((9, 14, 5, 6, 11))
    engine.load_adapter("read", adapter_directory())
    cancelled = engine.add(prompts[0], greedy(20), adapter="read")
    stopped, stays = (engine.add(prompt, greedy(20)) for prompt in prompts[1:3])
    events = [event for _ in range(3) for event in engine.step()]
    engine.unload_adapter("read")
    assert engine.begin_step()
    assert engine.cancel(cancelled)
    assert engine.stop(stopped, 0, 2)
    comes = engine.add(prompts[3], greedy(20))
    again = engine.add(prompts[4], greedy(20))
    engine.check_integrity()
    events += engine.finish_step()
    events += drain(engine)
    got = tokens_by_request(events)
    assert got[stays] == expected_tokens(prompts[2], 20)
    assert (got[comes], got[again]) == (
        expected_tokens(prompts[3], 20),
        expected_tokens(prompts[4], 20),
    )
    ends = [
        chunk.finish_reason
        for chunk in events
        if isinstance(chunk, Chunk) and chunk.finish_reason is not None
    ]
    assert sorted(ends) == ["cancelled", "length", "length", "length", "stop"]
    assert watched(engine).versions == set()
    assert_nothing_is_held(engine)


def test_a_request_may_be_cancelled_in_a_step_that_fails():
    engine = make_engine()
    watched(engine).fail = lambda batch: StepFailure(message="full")
    one = engine.add(prompts_of((1,))[0], greedy(20))
    assert engine.begin_step()
    engine.cancel(one)
    (chunk,) = engine.finish_step()
    assert isinstance(chunk, Chunk) and chunk.finish_reason == "cancelled"
    assert_nothing_is_held(engine)


def test_a_step_that_was_begun_and_never_finished_is_finished_with_the_next():
    engine = make_engine()
    (prompt,) = prompts_of((9,))
    one = engine.add(prompt, greedy(8))
    assert engine.begin_step()
    assert tokens_by_request(drain(engine))[one] == expected_tokens(prompt, 8)
