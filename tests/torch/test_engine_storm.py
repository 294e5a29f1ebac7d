"""Everything at once, in any order, on a small pool, on a device that runs out of memory whenever it likes: every page
is accounted for after every step, and in the end everybody has been answered and everything is free.
"""

from collections import Counter
from functools import cache
from random import Random

from coserve.engine.runner import StepFailedError, Tasklets, Work
from coserve.engine.torch_runner import TorchRunner
from engines import (
    BLOCK,
    FAST,
    FixedLatency,
    TickingClock,
    adapter_directory,
    examples_of,
    expected_tokens,
    prompts_of,
    random_policy,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.core import EngineCore
from coserve.engine.job import JobEvent
from coserve.engine.request import Chunk
from coserve.errors import CoserveError
from coserve.simulate import ModelledRunner, roofline_profile
from coserve.tuning.config import TuningConfig

NUM_PAGES = 80
PROMPTS = prompts_of((3, 8, 17, 30, 1, 60))
JOBS = {
    "plain": TuningConfig(num_epochs=2, batch_size=2, max_pack_tokens=16),
    "live": TuningConfig(num_epochs=2, batch_size=2, max_pack_tokens=10, live=True, evaluate_every_steps=1),
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
    *("cancel", "unload", "pause", "resume", "cancel-job", "fail-before", "fail-midway", "fail-update", "fail-after"),
)


class FailingRunner:
    """A runner that runs out of memory when it is told to: before a step, within its tasklets, or at its end."""

    def __init__(self, runner):
        self._runner, self.fail_next = runner, None

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def load_adapter(self, key, directory):
        return 5 if isinstance(self._runner, ModelledRunner) else self._runner.load_adapter(key, directory)

    def run(self, work):
        moment, self.fail_next = self.fail_next, None
        if moment == "midway":
            for trainer, num_rows, num_tasklets in work.tasklets[:1]:
                part = Tasklets(trainer, num_rows, num_tasklets - 1)
                self._runner.run(Work(tasklets=[part]))
                if isinstance(self._runner, TorchRunner) and not trainer.training_pass.done:
                    trainer.training_pass.next_tasklet(num_rows).run(2)
        elif moment == "update":  # within the next one that there is
            if not work.updates:
                self.fail_next = moment
                return self._runner.run(work)
            self._runner.run(Work(tasklets=work.tasklets))
            raise StepFailedError("a storm", broken_update=True)
        elif moment != "before":
            result = self._runner.run(work)
        if moment is not None:  # optimizer steps that were made stand
            raise StepFailedError("a storm", norms=result.norms if moment == "after" else ())
        return result


class Storm:
    """An engine, and what is known of what was asked of it."""

    def __init__(self, runner, seed, *, anyhow, **config):
        self.runner = FailingRunner(runner)
        config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0, **config)
        self.engine = EngineCore(self.runner, FixedLatency(_profile()), config, num_pages=NUM_PAGES)
        if anyhow:
            self.engine.policy = random_policy(seed)
        self.rng = Random(seed)
        self.modelled = isinstance(runner, ModelledRunner)
        self.asked = {}
        self.chunks, self.job_events = [], []

    def step(self):
        for event in self.engine.step():
            (self.chunks if isinstance(event, Chunk) else self.job_events).append(event)
        self.engine.check_integrity()

    def do(self, operation):
        engine, rng = self.engine, self.rng
        if operation == "burst":
            for _ in range(5):
                self.do("add")
        elif operation.startswith("add"):
            prompt = rng.choice(PROMPTS)
            n = rng.choice((1, 2, 3)) if operation == "add-many" else 1
            params = SamplingParams(max_tokens=rng.choice((1, 9, 30)), temperature=0.0, n=n)
            label = rng.choice([None, rng.choice(engine.versions.labels() or [None])])
            self.asked[engine.add_tokens(prompt, params, adapter=label)] = (prompt, params, label)
        elif operation == "cancel" and engine._requests:
            engine.cancel(rng.choice(list(engine._requests)))
        elif operation.startswith("submit"):
            labels = engine.versions.labels()
            adapter = LoraConfig(r=rng.choice((1, 4)), target_modules=rng.choice(("all-linear", ("v_proj",))))
            if operation == "submit-from" and labels and not self.modelled:
                adapter = rng.choice(labels)
            engine.submit_examples(
                examples_of((5, 9, 3), rng.randrange(3)),
                JOBS[rng.choice(list(JOBS))],
                adapter=adapter,
                validation=examples_of((4, 8)) if rng.random() < 0.5 else (),
            )
        elif operation == "load":
            engine.load_adapter(f"adapter-{rng.randrange(4)}", _directory())
        elif operation == "unload" and engine.versions.labels():
            engine.unload_adapter(rng.choice(engine.versions.labels()).split("@")[0])
        elif operation in ("pause", "resume", "cancel-job"):
            if jobs := [job for job in engine.jobs.values() if not job.is_terminal]:
                act = {"pause": engine.pause_job, "resume": engine.resume_job, "cancel-job": engine.cancel_job}
                act[operation](rng.choice(jobs).id)
        elif operation.startswith("fail-"):
            self.runner.fail_next = operation.removeprefix("fail-")
        for _ in range(rng.randrange(8) if operation == "steps" else rng.randrange(2)):
            self.step()

    def calm(self):
        """No more failures: everything comes to its end."""
        self.runner.fail_next = None
        for _ in range(3000):
            for job in self.engine.jobs.values():
                if job.state == "paused":
                    self.engine.resume_job(job.id)
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"there is no end: {self.engine.stats()}")

    def assert_all_is_well(self):
        engine = self.engine
        finals = Counter((chunk.request, chunk.index) for chunk in self.chunks if chunk.finish_reason is not None)
        assert finals == {(name, i): 1 for name, (_, params, _) in self.asked.items() for i in range(params.n)}
        last = {(chunk.request, chunk.index): chunk for chunk in self.chunks}
        assert all(chunk.finish_reason is not None for chunk in last.values()), "nothing comes behind a final chunk"
        lengths = Counter()
        for chunk in self.chunks:
            lengths[chunk.request, chunk.index] += len(chunk.tokens)
        for key, chunk in last.items():
            if chunk.finish_reason == "length":
                assert lengths[key] == self.asked[key[0]][1].max_tokens
        over = Counter(e.job for e in self.job_events if e.kind in ("succeeded", "failed", "cancelled"))
        assert over == dict.fromkeys(engine.jobs, 1)
        for job in engine.jobs.values():
            steps = [event.step for event in self.job_events if event.job == job.id and event.kind == "step"]
            assert steps == list(range(1, len(steps) + 1))
            if job.state == "succeeded":
                assert len(steps) == job.order.num_steps
                assert job.num_tokens_trained == job.config.num_epochs * (5 + 9 + 3)
        drops = sum(event.kind == "pack_dropped" for event in self.job_events if isinstance(event, JobEvent))
        assert drops <= engine.stats().num_packs_dropped
        owners = engine.pool.num_pages_by_owner()
        assert owners.get("kv", 0) == engine.cache.prefixes.num_evictable
        assert "activations" not in owners
        engine.cache.evict(NUM_PAGES)
        assert engine.pool.num_free == NUM_PAGES
        engine.check_integrity()
        for name in {label.split("@")[0] for label in engine.versions.labels()}:
            engine.unload_adapter(name)
        assert not engine.versions._readers
        assert not engine.versions._transient
        if not self.modelled:
            assert engine.runner._versions == {}

    def assert_tokens_are_right(self):
        """Whatever was preempted, dropped and failed around them: tokens of the bare model are transformers'."""
        got = {}
        for chunk in self.chunks:
            got[chunk.request, chunk.index] = got.get((chunk.request, chunk.index), ()) + chunk.tokens
        for (name, _), tokens in got.items():
            prompt, _, label = self.asked[name]
            if label is None:
                assert tokens == expected_tokens(prompt, 30)[: len(tokens)]


@cache
def _profile():
    return roofline_profile(make_backbone(), FAST)


@cache
def _directory():
    return adapter_directory()


def run_storm(storm, operations):
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
UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=120, **UNHURRIED)
@given(**STORMS)
def test_storms_on_a_modelled_device(operations, seed, anyhow, max_step_rows, max_requests):
    runner = ModelledRunner(make_backbone(), _profile())
    run_storm(Storm(runner, seed, anyhow=anyhow, max_step_rows=max_step_rows, max_requests=max_requests), operations)


@settings(max_examples=10, **UNHURRIED)
@given(**STORMS)
def test_storms_on_torch(operations, seed, anyhow, max_step_rows, max_requests):
    runner = TorchRunner(make_backbone())
    runner.clock = TickingClock()
    storm = Storm(runner, seed, anyhow=anyhow, max_step_rows=max_step_rows, max_requests=max_requests)
    run_storm(storm, operations)
    storm.assert_tokens_are_right()


def test_storms_reach_what_they_are_about():
    """Some long ones: packs are dropped, requests preempted, jobs end in every way."""
    num_preemptions, num_dropped = 0, 0
    job_ends, request_ends = set(), set()
    for seed in range(4):
        runner = TorchRunner(make_backbone())
        runner.clock = TickingClock()
        storm = Storm(runner, seed, anyhow=True, max_step_rows=40)
        run_storm(storm, Random(seed).choices(OPERATIONS, k=150))
        storm.assert_tokens_are_right()
        num_preemptions += storm.engine.num_preemptions
        num_dropped += storm.engine.stats().num_packs_dropped
        job_ends |= {job.state for job in storm.engine.jobs.values()}
        request_ends |= {chunk.finish_reason for chunk in storm.chunks}
    assert num_preemptions > 0
    assert num_dropped > 3
    assert job_ends >= {"succeeded", "failed", "cancelled"}
    assert request_ends >= {"length", "cancelled"}
