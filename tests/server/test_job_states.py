"""Jobs through any order of what can happen to them: clients, engines that come and go, servers
that end.

The engine here only counts: it is told the same, and tells the same, as the real one, a thousand
times faster. What it says may come late, and be lost with it.
"""

import asyncio
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from job_data import DATA
from job_engine import TENANT, World

from coserve.engine.jobs.events import JobEvent
from coserve.errors import EngineGoneError, JobError, JobOverError
from coserve.jobs.lifecycle.events import EngineReported
from coserve.jobs.messages import Checkpointed

NUM_STEPS = 14  # two epochs of seven
ASKED: dict[str, Any] = {
    "hyperparameters": {"n_epochs": 2, "batch_size": 1},
    "extension": {"checkpoint_every_steps": 4},
}
OVER = ("succeeded", "failed", "cancelled")


class CountingEngine:
    """Implements `JobEngine`: a job is the number of its steps."""

    def __init__(self, manager):
        self._manager = manager
        self.steps, self.paused = {}, set()
        self._starts, self._unsaid = {}, []
        self.is_alive = True

    async def start_job(self, job):
        self._check()
        assert job.id not in self.steps, "an engine is given a job once"
        self._starts[job.id] = job
        self.steps[job.id] = 0
        if job.checkpoint is not None:
            assert (Path(job.checkpoint) / "optimizer.safetensors").exists()
            self.steps[job.id] = int((Path(job.checkpoint) / "job.json").read_text())

    async def pause_job(self, job):
        self._check(job)
        self.paused.add(job)
        self._checkpoint(job, listed=False)
        self.say()

    async def resume_job(self, job):
        self._check(job)
        self.paused.discard(job)
        self.say()

    async def cancel_job(self, job):
        self._check(job)
        self._checkpoint(job, listed=False)
        self._end(job, "cancelled")
        self.say()

    def _check(self, job=None):
        if not self.is_alive:
            raise EngineGoneError("dead")
        if job is not None and job not in self.steps:
            raise JobOverError("there is no such job, or it is over")

    def step(self, job):
        """One optimizer step, or what follows the last."""
        if self.steps[job] == NUM_STEPS:
            self._checkpoint(job, listed=True, is_terminal=True)
            self._end(job, "succeeded")
            return
        self.steps[job] += 1
        self._unsaid.append(
            self._event(job, "step", loss=1.0, token_accuracy=0.5, norm=1.0, num_tokens=3)
        )
        every = self._starts[job].checkpoint_every_steps
        if self.steps[job] % every == 0:
            self._checkpoint(job, listed=True)

    def say(self):
        """Tell all that has happened."""
        for each in self._unsaid:
            report = (
                EngineReported(events=[each])
                if isinstance(each, JobEvent)
                else EngineReported(checkpoints=[each])
            )
            self._manager.engine_reported(report.events, report.checkpoints)
        self._unsaid.clear()

    def _event(self, job, kind, **fields):
        return JobEvent(
            job=job, kind=kind, step=self.steps[job], now_s=float(self.steps[job]), **fields
        )

    def _end(self, job, kind):
        self._unsaid.append(self._event(job, kind))
        del self.steps[job]
        self.paused.discard(job)

    def _checkpoint(self, job, *, listed, is_terminal=False):
        parent, number = Path(self._starts[job].checkpoints), 0
        while (
            directory := parent / f"step-{self.steps[job]}{f'-{number}' if number else ''}"
        ).exists():
            number += 1
        directory.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors", "job.json"):
            (directory / name).write_text(str(self.steps[job]))
        if not is_terminal:
            (directory / "optimizer.safetensors").write_text("")
        self._unsaid.append(
            Checkpointed(job=job, step=self.steps[job], directory=str(directory), listed=listed)
        )


class Lives(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.home = Path(mkdtemp(prefix="coserve-states-"))
        self.expected = {}
        self.engine = None
        self.run(self.start_server())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def teardown(self):
        self.run(self.finish())
        self.runner.close()

    # -- the world ------------------------------------------------------------------

    async def start_server(self):
        self.world = World(self.home)
        await self.world.manager.start()
        self.new_engine()
        await self.settle()

    def new_engine(self):
        self.engine = self.world.link.engine = CountingEngine(self.world.manager)
        self.world.manager.engine_ready()

    async def settle(self):
        """Wait until nothing is left to be done."""
        await self.world.manager.settled()

    def job(self, number):
        ids = list(self.expected)
        return ids[number % len(ids)]

    def expect_lost(self):
        """Expect jobs of an engine that has died to be queued."""
        for id, status in self.expected.items():
            if status == "running":
                self.expected[id] = "queued"

    def expect_done(self):
        """Expect jobs that the engine has finished and reported to have succeeded."""
        for id, status in self.expected.items():
            if status == "running" and id not in self.engine.steps:
                self.expected[id] = "succeeded"

    def expect_taken(self):
        for id, status in self.expected.items():
            if status == "queued":
                self.expected[id] = "running"

    # -- what can happen --------------------------------------------------------------

    @precondition(lambda self: len(self.expected) < 4)
    @rule()
    def create(self):
        async def story():
            job = await self.world.create(DATA, **ASKED)
            self.expected[job.id] = "running" if self.engine is not None else "queued"
            await self.settle()

        self.run(story())

    @precondition(lambda self: self.expected)
    @rule(number=st.integers(0, 3), verb=st.sampled_from(["cancel", "pause", "resume"]))
    def ask(self, number, verb):
        id = self.job(number)
        before = self.expected[id]
        allowed = (
            before
            in {
                "cancel": ("running", "queued", "paused"),
                "pause": ("running", "queued"),
                "resume": ("paused",),
            }[verb]
        )

        async def story():
            # The engine may be further than what it has said: then the job may turn out to be over.
            was_over = (
                self.engine is not None and before == "running" and id not in self.engine.steps
            )
            try:
                found = await getattr(self.world.manager, verb)(TENANT, id)
            except JobError:
                assert was_over or not allowed
                if was_over:
                    self.engine.say()
                    await self.settle()
                    self.expected[id] = "succeeded"
                return
            assert allowed
            after = {"cancel": "cancelled", "pause": "paused"}.get(verb) or (
                "running" if self.engine is not None else "queued"
            )
            if was_over:
                self.engine.say()
                await self.settle()
                after = self.world.job(id).status
                assert after in ("cancelled", "succeeded")
            else:
                assert found.status == after
            self.expected[id] = after
            await self.settle()

        self.run(story())
        if self.engine is not None and not self.engine._unsaid:  # asking made the engine tell all
            self.expect_done()

    @precondition(lambda self: self.engine is not None and self.engine.steps)
    @rule(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=12), says=st.booleans())
    def steps(self, numbers, says):
        async def story():
            for number in numbers:
                running = [id for id in self.engine.steps if id not in self.engine.paused]
                if running:
                    self.engine.step(running[number % len(running)])
            if says:
                self.engine.say()
                await self.settle()
                self.expect_done()

        self.run(story())

    @rule(comes_back=st.booleans(), says=st.booleans())
    def engine_dies(self, comes_back, says):
        async def story():
            if self.engine is not None:
                if says:
                    self.engine.say()
                    self.expect_done()
                self.engine.is_alive = False
                self.engine = self.world.link.engine = None
                self.world.manager.engine_gone(())
                self.expect_lost()
            if comes_back:
                self.new_engine()
                self.expect_taken()
            await self.settle()
            self.see_what_was_done()

        self.run(story())

    @rule(in_good_order=st.booleans())
    def server_ends(self, in_good_order):
        async def story():
            if in_good_order:
                await self.world.manager.close()
            else:
                await self.world.abandon()
            self.world.store.close()
            self.expect_lost()
            await self.start_server()
            self.expect_taken()
            self.see_what_was_done()

        self.run(story())

    def see_what_was_done(self):
        """A job whose last checkpoint of all was told, but not that it has succeeded, is over all
        the same."""
        for id, status in self.expected.items():
            if status == "running" and self.world.job(id).status == "succeeded":
                self.expected[id] = "succeeded"

    # -- what is always so --------------------------------------------------------------

    @invariant()
    def jobs_are_as_expected(self):
        if not self.expected:
            return
        unsaid = self.engine is not None and bool(self.engine._unsaid)
        for id, status in self.expected.items():
            job = self.world.job(id)
            assert job.status == status, (job.status, status)
            steps = [event.step for event in self.world.events(id) if event.kind == "step"]
            assert steps == list(range(1, job.num_steps_done + 1))
            if self.engine is not None and not unsaid:
                assert (id in self.engine.steps) == (
                    status == "running" or id in self.engine.paused
                )
                assert self.engine.steps.get(id, job.num_steps_done) == job.num_steps_done
            listed = [each.step for each in self.world.checkpoints(id)]
            if status == "succeeded":
                assert (job.num_steps_done, listed) == (NUM_STEPS, [4, 8, 12, NUM_STEPS])
                assert self.world.manager.adapters.find(TENANT, job.name) is not None
            else:
                assert self.world.manager.adapters.find(TENANT, job.name) is None
            assert (
                listed
                == [step for step in (4, 8, 12, NUM_STEPS) if step <= job.num_steps_done][
                    : len(listed)
                ]
            )
            for each in self.world.checkpoints(id):
                assert (Path(each.directory) / "adapter_model.safetensors").exists()
                assert (
                    self.world.manager.adapters.find(TENANT, each.name).directory == each.directory
                )
            if status in OVER:
                assert job.finished_at is not None
                folder = self.home / "jobs" / id
                names = {str(path) for path in (folder / "checkpoints").glob("*")}
                assert names == {each.directory for each in self.world.checkpoints(id)}
                assert not list(folder.rglob("optimizer.safetensors"))
                assert not list(folder.glob("*.msgpack"))

    async def finish(self):
        """Let every job that is left come to its end."""
        if self.engine is None:
            self.new_engine()
        await self.settle()
        for id, status in self.expected.items():
            if status == "paused":
                await self.world.manager.resume(TENANT, id)
        while self.engine.steps:
            for id in list(self.engine.steps):
                self.engine.step(id)
            self.engine.say()
            await self.settle()
        self.engine.say()
        await self.settle()
        for id in self.expected:
            assert self.world.job(id).status in OVER
        await self.world.manager.close()
        self.world.store.close()


Lives.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
TestLives = Lives.TestCase
