"""Everything at once, in any order, on a small pool, on a device that runs out of memory whenever
it likes: every page is accounted for after every step, and in the end everybody has been answered
and everything is free.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    FAST,
    FixedLatency,
    TickingClock,
    WatchedDevice,
    adapter_directory,
    assert_nothing_is_held,
    examples_of,
    expected_tokens,
    prompts_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from random_plans import random_policy
from support import RaisingMode, make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.base import Clock, Device
from coserve.devices.messages.commands import CloseRequest, Command, OpenRequest, Reply
from coserve.devices.messages.jobs import BeginPack
from coserve.devices.messages.steps import RequestRows, StepBatch, StepFailure, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.device import TorchDevice
from coserve.engine.config import EngineConfig
from coserve.engine.jobs.events import JobEvent
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.errors import CoserveError
from coserve.scheduling.profile import Profile
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import TuningConfig

pytestmark = pytest.mark.long

NUM_PAGES = 80
PROMPTS = prompts_of((3, 8, 17, 30, 1, 60))
JOBS = {
    "plain": TuningConfig(num_epochs=2, batch_size=2, max_pack_tokens=16),
    "live": TuningConfig(
        num_epochs=2, batch_size=2, max_pack_tokens=10, live=True, evaluate_every_steps=1
    ),
    "often": TuningConfig(num_epochs=1, batch_size=1, max_pack_tokens=20, publish_every_steps=1),
}
OPERATIONS = (
    *(
        "add",
        "add",
        "burst",
        "add-many",
        "step",
        "step",
        "steps",
        "steps",
        "steps",
        "submit",
        "submit-from",
        "load",
        "load",
    ),
    *("cancel", "unload", "pause", "resume", "cancel-job"),
    *(
        "fail-before",
        "fail-midway",
        "fail-update",
        "fail-after",
        "fail-made",
        "fail-within",
        "fail-hard",
    ),
    "fail-jobs",
)


class StormError(Exception):
    """What a device raises that is broken."""


class FailingDevice:
    """A device that fails when it is told to (`fail`): some of the step has run then, and requests
    have their pages.

    The moments: before anything ran; midway, after losses and tasklets; in an update, the ones
    before it are made; after all of it; made, after all of one with updates. Within: the device
    itself runs out of memory, somewhere. Hard: `collect` raises an error. Jobs: every step with a
    piece of a job in it, until something else is to fail.
    """

    def __init__(self, inner: Device, rng: Random) -> None:
        self.inner, self.info, self.clock = inner, inner.info, inner.clock
        self.num_failures: Counter[str] = Counter()
        self.num_updates: Counter[str] = Counter()  # that each job was told of
        self.broken_jobs: set[str] = set()
        self._rng, self._moment = rng, ""
        self._calls: RaisingMode | None = None
        self._evaluating: dict[str, bool] = {}
        self._fails: str = ""  # how the step under way does
        self._broken: str | None = None

    def fail(self, moment: str) -> None:
        """The next step fails, or the next one that can; "" for none."""
        self._moment, self._calls = moment, None
        if moment == "within" and isinstance(self.inner, ModelledDevice):
            self.inner.fail_next, self._moment = StepFailure(message="a storm"), ""
        elif moment == "within":
            num_calls = self._rng.choice((1, 20, 100, 300, 1000))
            self._calls, self._moment = (
                RaisingMode(torch.OutOfMemoryError("a storm"), num_calls),
                "",
            )

    def execute(self, command: Command) -> Reply:
        if isinstance(command, BeginPack):
            self._evaluating[command.job] = command.evaluate
        return self.inner.execute(command)

    def submit(self, batch: StepBatch) -> None:
        if self._moment == "jobs":
            self._fails = "jobs" if batch.windows or batch.losses or batch.tasklets else ""
        elif batch.updates or self._moment not in ("update", "made"):
            self._fails, self._moment = self._moment, ""
        if self._fails:
            batch = self._first_part(batch)
        with self._calls or nullcontext():
            self.inner.submit(batch)

    def collect(self) -> StepResult:
        (moment, self._fails), (broken, self._broken) = (self._fails, ""), (self._broken, None)
        result = self.inner.collect()
        if result.failure is not None:
            self._calls = None
        elif moment:
            failure = StepFailure(message="a storm", broken_update=broken)
            result = StepResult(step=result.step, norms=result.norms, failure=failure)
        if result.failure is not None:
            self.num_failures[moment or "within"] += 1
        if moment == "hard":
            raise StormError
        self.num_updates.update(result.norms.keys())
        if broken is not None:
            self.broken_jobs.add(broken)
        return result

    def close(self) -> None:
        self.inner.close()

    def _first_part(self, batch: StepBatch) -> StepBatch:
        """What runs of a step before it fails. No pack gets done in it: those of failed steps never
        are."""
        moment = (
            self._rng.choice(("before", "midway", "after"))
            if self._fails == "hard"
            else self._fails
        )
        part = replace(
            batch,
            losses=(),
            tasklets=(),
            updates=(),
            requests=_without_rows(batch.requests),
            windows=(),
        )
        if moment in ("before", "jobs"):
            return part
        losses = tuple(piece for piece in batch.losses if not self._evaluating[piece.job])
        tasklets = tuple(
            replace(piece, num_tasklets=piece.num_tasklets - 1) for piece in batch.tasklets
        )
        part = replace(
            part, losses=losses, tasklets=tuple(piece for piece in tasklets if piece.num_tasklets)
        )
        if moment == "update":
            number = self._rng.randrange(len(batch.updates))
            self._broken = batch.updates[number].job
            return replace(part, updates=batch.updates[:number])
        if moment == "midway":
            return part
        requests = tuple(replace(rows, samples=False, targets=()) for rows in batch.requests)
        return replace(part, updates=batch.updates, requests=requests, windows=batch.windows)


def _without_rows(requests: Sequence[RequestRows]) -> tuple[RequestRows, ...]:
    """Pages alone."""
    return tuple(replace(rows, tokens=(), samples=False, targets=()) for rows in requests)


class Storm:
    """An engine, and what is known of what was asked of it."""

    def __init__(
        self, device: Device, clock: Clock, seed: int, *, anyhow: bool, **settings: Any
    ) -> None:
        self.rng = Random(seed)
        self.failing = FailingDevice(device, self.rng)
        self.device = WatchedDevice(self.failing, clock)
        config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0, **settings)
        self.engine = TokenEngine(self.device, FixedLatency(_profile()), config)
        if anyhow:
            self.engine.policy = random_policy(seed)
        self.asked: dict[str, tuple[list[int], SamplingParams, str | None]] = {}
        self.chunks: list[Chunk] = []
        self.job_events: list[JobEvent] = []
        self._actions: dict[str, Callable[[], None]] = {
            "add": self._add,
            "add-many": partial(self._add, may_have_many=True),
            "burst": self._add_burst,
            "cancel": self._cancel,
            "submit": self._submit,
            "submit-from": partial(self._submit, from_served=True),
            "load": self._load,
            "unload": self._unload,
            "pause": partial(self._change_job, self.engine.pause_job),
            "resume": partial(self._change_job, self.engine.resume_job),
            "cancel-job": partial(self._change_job, self.engine.cancel_job),
        }

    def step(self) -> None:
        try:
            events = self.engine.step()
        except StormError:  # what there is to tell comes with the next step
            events = []
        for event in events:
            if isinstance(event, Chunk):
                self.chunks.append(event)
            else:
                self.job_events.append(event)
        self.engine.check_integrity()

    def do(self, operation: str) -> None:
        """Do one of `OPERATIONS`, as far as it is possible now, and up to a few steps."""
        if operation.startswith("fail-"):
            self.failing.fail(operation.removeprefix("fail-"))
        elif operation in self._actions:
            self._actions[operation]()
        for _ in range(self.rng.randrange(8) if operation == "steps" else self.rng.randrange(2)):
            self.step()

    def _add(self, *, may_have_many: bool = False) -> None:
        rng = self.rng
        prompt = rng.choice(PROMPTS)
        n = rng.choice((1, 2, 3)) if may_have_many else 1
        params = SamplingParams(max_tokens=rng.choice((1, 9, 30)), temperature=0.0, n=n)
        label = rng.choice([None, rng.choice(self.engine.versions.labels() or [None])])
        name = self.engine.add_tokens(prompt, params, adapter=label)
        self.asked[name] = (prompt, params, label)

    def _add_burst(self) -> None:
        for _ in range(5):
            self.do("add")

    def _cancel(self) -> None:
        if self.engine.has_requests:
            names = sorted({request.request for request in self.engine.requests})
            self.engine.cancel(self.rng.choice(names))

    def _submit(self, *, from_served: bool = False) -> None:
        rng, labels = self.rng, self.engine.versions.labels()
        adapter: LoraConfig | str = LoraConfig(
            r=rng.choice((1, 4)), target_modules=rng.choice(("all-linear", ("v_proj",)))
        )
        if from_served and labels:
            adapter = rng.choice(labels)
        self.engine.submit_examples(
            examples_of((5, 9, 3), rng.randrange(3)),
            JOBS[rng.choice(list(JOBS))],
            adapter=adapter,
            validation=examples_of((4, 8)) if rng.random() < 0.5 else (),
        )

    def _load(self) -> None:
        self.engine.load_adapter(f"adapter-{self.rng.randrange(4)}", _directory())

    def _unload(self) -> None:
        if labels := self.engine.versions.labels():
            self.engine.unload_adapter(self.rng.choice(labels).split("@")[0])

    def _change_job(self, change: Callable[[str], None]) -> None:
        if jobs := [job for job in self.engine.jobs.values() if not job.is_terminal]:
            change(self.rng.choice(jobs).id)

    def calm(self) -> None:
        """No more failures: everything comes to its end."""
        self.failing.fail("")
        for _ in range(3000):
            for job in self.engine.jobs.values():
                if job.state == "paused":
                    self.engine.resume_job(job.id)
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"there is no end: {self.engine.stats()}")

    def assert_all_is_well(self) -> None:
        engine = self.engine
        finals = Counter(
            (chunk.request, chunk.index) for chunk in self.chunks if chunk.finish_reason is not None
        )
        assert finals == {
            (name, i): 1 for name, (_, params, _) in self.asked.items() for i in range(params.n)
        }
        last = {(chunk.request, chunk.index): chunk for chunk in self.chunks}
        assert all(chunk.finish_reason is not None for chunk in last.values()), (
            "nothing comes after a final chunk"
        )
        lengths: Counter[tuple[str, int]] = Counter()
        for chunk in self.chunks:
            lengths[chunk.request, chunk.index] += len(chunk.tokens)
        for key, chunk in last.items():
            if chunk.finish_reason == "length":
                assert lengths[key] == self.asked[key[0]][1].max_tokens
        over = Counter(
            e.job for e in self.job_events if e.kind in ("succeeded", "failed", "cancelled")
        )
        assert over == dict.fromkeys(engine.jobs, 1)
        for job in engine.jobs.values():
            steps = [
                event.step
                for event in self.job_events
                if event.job == job.id and event.kind == "step"
            ]
            assert steps == list(range(1, self.failing.num_updates[job.id] + 1))
            assert job.state == "failed" or job.id not in self.failing.broken_jobs
            if job.state == "succeeded":
                assert len(steps) == job.order.num_steps
                assert job.num_tokens_trained == job.config.num_epochs * (5 + 9 + 3)
        drops = sum(
            event.kind == "pack_dropped" for event in self.job_events if isinstance(event, JobEvent)
        )
        assert drops <= engine.stats().num_packs_dropped
        assert_nothing_is_held(engine)
        assert engine.pool.num_free == NUM_PAGES
        for name in {label.split("@")[0] for label in engine.versions.labels()}:
            engine.unload_adapter(name)
        self.step()  # without work: what the device has not been told yet
        assert self.device.versions == set(), (
            "a version stays as long as a request or a name reads it, no longer"
        )
        told = self.device.commands
        opened = Counter(command.request for command in told if isinstance(command, OpenRequest))
        assert opened == Counter(
            command.request for command in told if isinstance(command, CloseRequest)
        )

    def assert_tokens_are_right(self) -> None:
        """Whatever was preempted, dropped and failed around them: tokens of the bare model are
        transformers'."""
        got: dict[tuple[str, int], tuple[int, ...]] = {}
        for chunk in self.chunks:
            got[chunk.request, chunk.index] = (
                got.get((chunk.request, chunk.index), ()) + chunk.tokens
            )
        for (name, _), tokens in got.items():
            prompt, _, label = self.asked[name]
            if label is None:
                assert tokens == expected_tokens(prompt, 30)[: len(tokens)]


@cache
def _profile() -> Profile:
    return roofline_profile(make_backbone(), FAST)


@cache
def _directory() -> str:
    return adapter_directory()


def run_storm(storm: Storm, operations: Sequence[str]) -> None:
    for operation in operations:
        try:
            storm.do(operation)
        except CoserveError:  # refused: then nothing has changed
            storm.engine.check_integrity()
    storm.calm()
    storm.assert_all_is_well()


STORMS = {
    "operations": st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=60),
    "seed": st.integers(0, 2**16),
    "anyhow": st.booleans(),
    "max_step_rows": st.sampled_from((2, 9, 2048)),
    "max_requests": st.sampled_from((1, 4, 256)),
}
UNHURRIED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def modelled_storm(seed: int, **settings: Any) -> Storm:
    device = ModelledDevice(make_backbone(), _profile(), num_pages=NUM_PAGES, block_tokens=BLOCK)
    return Storm(device, device.clock, seed, **settings)


def torch_storm(seed: int, **settings: Any) -> Storm:
    device = TorchDevice(
        make_backbone(), num_pages=NUM_PAGES, block_tokens=BLOCK, profile=_profile()
    )
    return Storm(device, TickingClock(), seed, **settings)


@settings(UNHURRIED, max_examples=120)
@given(**STORMS)
def test_storms_on_a_modelled_device(operations, seed, anyhow, max_step_rows, max_requests):
    storm = modelled_storm(
        seed, anyhow=anyhow, max_step_rows=max_step_rows, max_requests=max_requests
    )
    run_storm(storm, operations)


@settings(UNHURRIED, max_examples=10)
@given(**STORMS)
def test_storms_on_torch(operations, seed, anyhow, max_step_rows, max_requests):
    storm = torch_storm(seed, anyhow=anyhow, max_step_rows=max_step_rows, max_requests=max_requests)
    run_storm(storm, operations)
    storm.assert_tokens_are_right()


def test_storms_reach_what_they_are_about():
    """Some long ones: packs are dropped, requests preempted, pages moved, steps fail and jobs end
    in every way."""
    num_preemptions, num_dropped, num_moved = 0, 0, 0
    job_ends, request_ends = set(), set()
    failures: set[str] = set()
    for seed in (0, 4, 8, 9, 12):
        storm = torch_storm(seed, anyhow=True, max_step_rows=40)
        run_storm(storm, Random(seed).choices(OPERATIONS, k=150))
        storm.assert_tokens_are_right()
        num_preemptions += storm.engine.num_preemptions
        num_dropped += storm.engine.stats().num_packs_dropped
        num_moved += storm.engine.stats().num_pages_moved
        job_ends |= {job.state for job in storm.engine.jobs.values()}
        request_ends |= {chunk.finish_reason for chunk in storm.chunks}
        failures |= storm.failing.num_failures.keys()
    assert num_preemptions > 0
    assert num_dropped > 3
    assert num_moved > 10
    assert job_ends >= {"succeeded", "failed", "cancelled"}
    assert request_ends >= {"length", "cancelled"}
    assert failures == {"before", "midway", "update", "after", "made", "within", "hard", "jobs"}
