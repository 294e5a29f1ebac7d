"""A storm on ranks: an engine whose model two processes hold, of which one is killed, stands still,
has no memory, is broken or late, while requests are answered and jobs learn; then calm, in which
everything comes to its end and is looked at.

What is done, one after the other, follows from the seed alone. When a process dies also depends on
the machine, so that a seed gives a similar storm each time and not the same.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

from engines import (
    FixedLatency,
    adapter_directory,
    examples_of,
    expected_tokens,
    greedy,
    prompts_of,
)
from job_data import adapter_in, distance
from msgspec.structs import replace
from processes import is_alive
from random_plans import random_policy
from rank_devices import BLOCK, FAST, settings
from storm.rank_faults import Instructions, RankFault, starter
from support import make_backbone

from coserve.adapters import LoraConfig
from coserve.devices.loading import open_device
from coserve.devices.messages.commands import DescribeRanks
from coserve.devices.ranks.group_device import GroupDevice
from coserve.engine.command_log import LostCommandError
from coserve.engine.config import EngineConfig
from coserve.engine.jobs.checkpoint import Checkpoint
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.errors import CoserveError, DeviceGoneError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import TuningConfig

NUM_RANKS, NUM_ACTIONS, NUM_TOKENS = 2, 150, 20
PROMPTS = prompts_of((3, 8, 17, 30, 60))
# Of the adapter that lies on disk.
_LORA: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
_NUM_PAGES, _NUM_HOST_PAGES, _MOST_JOBS = 120, 200, 3
# A rank that does not come for this long ends the group; one that is late comes sooner.
_RANK_TIMEOUT_S, _LATE_S = 3.0, 0.3
# Limits for the group to notice a rank's end, on a machine that has other things to do, and for all
# ranks to be gone.
_NOTICED_S, _GONE_S = 5.0, 10.0
_CALM_S = 120.0
# Float32: beside others, a job's windows are cut elsewhere. A step that is lost or made twice moves
# parameters by 1e-3.
_TOLERANCE = 1e-4
# Examples, and how a job learns from them.
_EXAMPLES = examples_of((5, 9, 3, 17, 12), 1)
JOBS = {
    "plain": TuningConfig(num_epochs=3, batch_size=2, max_pack_tokens=20),
    "often": TuningConfig(num_epochs=2, batch_size=1, max_pack_tokens=30, publish_every_steps=2),
    "live": TuningConfig(num_epochs=2, batch_size=2, max_pack_tokens=30, live=True),
    "validated": TuningConfig(num_epochs=2, batch_size=3, evaluate_every_steps=1),
}
_ADAPTER = LoraConfig(r=2, target_modules="all-linear", dropout=0.1)
_TAKE_MEMORY = (
    "OpenVersion",
    "OpenTrainer",
    "BeginPack",
    "PublishVersion",
    "TakeCheckpoint",
    "SwapIn",
    "SwapInTensors",
)
# How often each is done, beside the others.
WEIGHTS = {
    "add": 8.0,
    "cancel": 1.0,
    "load": 1.0,
    "unload": 1.0,
    "submit": 2.0,
    "pause": 1.0,
    "resume": 2.0,
    "cancel_job": 0.3,
    "checkpoint": 4.0,
    "steps": 16.0,
    "fault": 3.0,
}
FAULTS = (
    *("is killed", "is stopped"),
    *(
        "dies in a step",
        "stands still in a step",
        "has no memory in a step",
        "is broken in a step",
        "is late in a step",
    ),
    *(
        "dies in a command",
        "stands still in a command",
        "has no memory in a command",
        "cannot read in a command",
    ),
    *("cannot write in a command", "is late in a command"),
)


@dataclass(kw_only=True)
class _Asked:
    """A request that was accepted."""

    prompt: int
    adapted: bool
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    was_cancelled: bool = False


@dataclass(kw_only=True)
class _Job:
    """A job that was accepted."""

    kind: str
    state: str = "running"
    step: int = 0
    """The last that was told."""
    checkpoints: list[tuple[int, Path]] = field(default_factory=list)
    num_trained: int = 0

    @property
    def is_over(self) -> bool:
        return self.state not in ("running", "paused")


class RankStorm:
    """done: how often what was done. broken: which promises were."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home, self._random = home, Random(seed)
        self._instructions_of, self._num_groups = home, 0
        self._asked: dict[str, _Asked] = {}
        self._jobs: dict[str, _Job] = {}
        self._taken: list[tuple[str, Checkpoint]] = []
        self._hit_s: float | None = None  # when somebody killed or stopped a rank
        self._is_calm = False
        self._policy_seed = self._random.choice((None, seed))
        self._num_host_pages = self._random.choice((0, _NUM_HOST_PAGES))
        self.done: Counter[str] = Counter()
        self.broken: list[str] = []
        self.noticed_s: list[float] = []
        self._start()

    def blow(self, num_actions: int) -> None:
        """The storm, and the calm after it."""
        for name in self._random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=num_actions):
            self.done[name] += 1
            self._tried(getattr(self, f"_{name}"))
            self._tried(self._step)
        self._is_calm = True
        self._instructions.revoke()
        until_s = time.monotonic() + _CALM_S
        while self._tried(self._start_lost_jobs) is False or self._has_work():
            if time.monotonic() > until_s:
                self.broken.append(f"there is no end: {self._engine.stats()}")
                return
            self._tried(self._resume_all)
            self._tried(self._step)

    def look(self) -> None:
        """At what came of requests and jobs, and at what is left on the ranks."""
        for name, asked in self._asked.items():
            self._look_at_request(name, asked)
        for id, job in self._jobs.items():
            self.done[f"{job.kind}: {job.state}"] += 1
            if job.state == "succeeded":
                self._look_at_job(id, job)
        self._look_at_ranks()
        for line in self._instructions.happened():
            self.done[f"fault: {line}"] += 1

    def close(self) -> None:
        """End the ranks."""
        self._device.close()

    # -- the engine -------------------------------------------------------------------

    def _start(self) -> None:
        """Start ranks and an engine: nothing of the old ones is left but what was written."""
        backbone = make_backbone("llama")
        page_bytes = kv_page_bytes(backbone, BLOCK) // NUM_RANKS
        given = settings(
            NUM_RANKS,
            memory_bytes=_NUM_PAGES * page_bytes,
            host_memory_bytes=self._num_host_pages * page_bytes,
            rank_timeout_s=_RANK_TIMEOUT_S,
        )
        self._num_groups += 1
        directory = self._home / "instructions"
        directory.mkdir(exist_ok=True)
        self._instructions = Instructions(directory)
        self._device = GroupDevice(given, start=starter(directory))
        config = EngineConfig(
            block_tokens=BLOCK, tpot_s=1.0, max_step_rows=self._random.choice((40, 2048))
        )
        latency = FixedLatency(roofline_profile(backbone, FAST))
        self._engine = TokenEngine(self._device, latency, config)
        if self._policy_seed is not None and not self._is_calm:
            self._engine.policy = random_policy(self._policy_seed + self._num_groups)

    def _start_again(self) -> None:
        """Throw the engine away, whose ranks have ended. Open answers end; jobs resume from their
        checkpoints."""
        pids = self._device.pids
        if self._hit_s is not None:
            self.noticed_s.append(time.monotonic() - self._hit_s)
            self._hit_s = None
        until_s = time.monotonic() + _GONE_S
        while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < until_s:
            time.sleep(0.005)
        if left:
            self.broken.append(f"ranks {left} of {pids} outlive the group")
        self._device.close()
        self._instructions.revoke()
        self.done["groups that ended"] += 1
        for asked in self._asked.values():
            asked.end = asked.end or "thrown away"
        self._taken.clear()
        self._start()

    def _tried(self, what: Callable[[], Any]) -> bool:
        """Do something that a fault may keep from being done; return whether it was done."""
        try:
            what()
        except DeviceGoneError:
            self._start_again()
            return False
        except (CoserveError, LostCommandError) as error:
            self.done[f"ended with {type(error).__name__}"] += 1
            return False
        except RuntimeError as error:
            if "the storm has broken a rank" not in str(error):
                raise
            self.done["ended with what the storm has broken"] += 1
            if self._random.random() < 0.5:  # a server's engine ends of it
                self._device.close()
                self._start_again()
            return False
        return True

    def _has_work(self) -> bool:
        return self._engine.has_work or any(not job.is_over for job in self._jobs.values())

    def _step(self) -> None:
        if self._engine.has_work:
            for event in self._engine.step():
                self._take(event)
            self._engine.check_integrity()

    def _take(self, event: Event) -> None:
        if isinstance(event, Chunk):
            asked = self._asked[event.request]
            if asked.end:
                self.broken.append(f"{event.request} has ended with {asked.end}, and gets {event}")
            asked.tokens += event.tokens
            asked.end = event.finish_reason or ""
            if event.finish_reason == "error" and "storm" not in (event.error or ""):
                self.broken.append(f"{event.request} ended with {event.error}")
            return
        job = self._jobs[event.job]
        if job.is_over:
            self.broken.append(f"{event.job} is over, and tells {event}")
        if event.kind == "step":
            if event.step != job.step + 1:
                self.broken.append(f"{event.job} has told step {job.step}, and then {event.step}")
            job.step = event.step
        elif event.kind in ("succeeded", "failed", "cancelled"):
            job.state = event.kind
            job.num_trained = self._engine.jobs[event.job].num_tokens_trained
            if event.kind == "failed" and "storm" not in event.message:
                self.broken.append(f"{event.job} failed: {event.message}")

    # -- what is done -----------------------------------------------------------------

    def _add(self) -> None:
        name, labels = f"request-{len(self._asked)}", self._engine.versions.labels()
        label = self._random.choice([None, *[each for each in labels if each.startswith("given")]])
        asked = _Asked(
            prompt=self._random.randrange(len(PROMPTS)),
            adapted=label is not None,
            num_tokens=self._random.choice((1, 6, NUM_TOKENS)),
        )
        self._engine.add_tokens(
            PROMPTS[asked.prompt], greedy(asked.num_tokens), adapter=label, request_id=name
        )
        self._asked[name] = asked

    def _cancel(self) -> None:
        if names := sorted({each.request for each in self._engine.requests}):
            self._asked[name := self._random.choice(names)].was_cancelled = True
            self._engine.cancel(name)

    def _load(self) -> None:
        self._engine.ensure_adapter("given", _given_adapter())

    def _unload(self) -> None:
        if "given" in self._engine.versions:
            self._engine.unload_adapter("given")

    def _submit(self) -> None:
        if sum(not job.is_over for job in self._jobs.values()) >= _MOST_JOBS:
            return
        id, job = f"job-{len(self._jobs)}", _Job(kind=self._random.choice(list(JOBS)))
        self._start_job(id, job)
        self._jobs[id] = job

    def _start_job(self, id: str, job: _Job) -> None:
        """Start a job, from its last checkpoint if there is one."""
        step, checkpoint = job.checkpoints[-1] if job.checkpoints else (0, None)
        _submit(self._engine, id, job.kind, checkpoint)
        job.step = step
        if job.state == "paused":
            self._engine.pause_job(id)

    def _start_lost_jobs(self) -> None:
        for id, job in self._jobs.items():
            if not job.is_over and id not in self._engine.jobs:
                self._start_job(id, job)

    def _pause(self) -> None:
        for id in self._some_job("running"):
            self._engine.pause_job(id)
            self._jobs[id].state = "paused"

    def _resume(self) -> None:
        self._start_lost_jobs()
        for id in self._some_job("paused"):
            self._engine.resume_job(id)
            self._jobs[id].state = "running"

    def _resume_all(self) -> None:
        for id, job in self._jobs.items():
            if job.state == "paused" and id in self._engine.jobs:
                self._engine.resume_job(id)
                job.state = "running"

    def _cancel_job(self) -> None:
        for id in self._some_job("running", "paused"):
            self._engine.cancel_job(id)

    def _checkpoint(self) -> None:
        """Take one, which is written later, or write one that was taken."""
        if self._taken and self._random.random() < 0.6:
            id, checkpoint = self._taken.pop(0)
            written = checkpoint.write(self._home / id)
            self._jobs[id].checkpoints.append((checkpoint.position.num_steps_done, written))
        for id in self._some_job("running", "paused"):
            self._taken.append((id, self._engine.checkpoint(id)))

    def _some_job(self, *states: str) -> list[str]:
        """Return the id of a job of the engine, or none."""
        found = [
            id for id, job in self._jobs.items() if job.state in states and id in self._engine.jobs
        ]
        found = [id for id in found if not self._engine.jobs[id].is_terminal]
        return self._random.sample(found, min(1, len(found)))

    def _steps(self) -> None:
        for _ in range(self._random.randrange(12)):
            self._step()

    def _fault(self) -> None:
        """One rank dies or fails, now or when it comes to something."""
        name, rank = self._random.choice(FAULTS), self._random.randrange(NUM_RANKS)
        if name in ("is killed", "is stopped"):
            self.done[f"fault: {name}"] += 1
            number = signal.SIGKILL if name == "is killed" else signal.SIGSTOP
            self._signal_soon(self._device.pids[rank], number)
            return
        what, _, where = name.partition(" in a ")
        fault = RankFault(what=what, where=where, late_s=_LATE_S)  # type: ignore[arg-type]
        if where == "step":
            fault = replace(fault, num_calls=self._random.choice((1, 5, 20, 60, 200)))
        else:
            fault = replace(fault, num_calls=self._random.choice((1, 2)), kinds=_kinds_of(what))
        self._instructions.give(rank, fault)

    def _signal_soon(self, pid: int, number: signal.Signals) -> None:
        """Within whatever the engine does then; at the latest it is noticed by what it does
        next."""

        def send() -> None:
            if is_alive(pid):
                os.kill(pid, number)
                self._hit_s = time.monotonic()

        timer = Timer(self._random.choice((0.0, 0.003, 0.02)), send)
        timer.start()
        try:
            until_s = time.monotonic() + _RANK_TIMEOUT_S + _NOTICED_S
            while time.monotonic() < until_s:  # which ends with DeviceGoneError
                if self._engine.has_work:
                    self._step()
                else:
                    self._device.execute(DescribeRanks())
            self.broken.append(f"the group does not notice in time that a rank got signal {number}")
        finally:
            timer.join()

    # -- the look ---------------------------------------------------------------------

    def _look_at_request(self, name: str, asked: _Asked) -> None:
        self.done[f"requests: {asked.end or 'open'}"] += 1
        expected = expected_tokens(
            PROMPTS[asked.prompt], NUM_TOKENS, **(_LORA if asked.adapted else {})
        )
        if tuple(asked.tokens) != expected[: len(asked.tokens)]:
            self.broken.append(f"{name} was answered {asked.tokens}, not {expected}")
        if asked.end == "length" and len(asked.tokens) != asked.num_tokens:
            self.broken.append(f"{name} was answered {asked.tokens}, not {asked.num_tokens} tokens")
        if not asked.end or (asked.end == "cancelled" and not asked.was_cancelled):
            self.broken.append(f"{name} came to no end, or to a wrong one: {asked}")

    def _look_at_job(self, id: str, job: _Job) -> None:
        num_tokens = JOBS[job.kind].num_epochs * sum(len(each.tokens) for each in _EXAMPLES)
        if job.num_trained != num_tokens:
            self.broken.append(
                f"{id}, {job.kind}, was trained on {job.num_trained} tokens, not {num_tokens}"
            )
        if id not in self._engine.versions:
            return  # the group that it ended on has ended since
        directory = self._home / f"{id}-learned"
        self._engine.save_adapter(id, directory)
        self.done["jobs whose adapter was compared"] += 1
        if (by := distance(adapter_in(directory), _reference(job.kind))) > _TOLERANCE:
            self.broken.append(f"{id}, {job.kind}, has learned something else, by {by:.2e}")

    def _look_at_ranks(self) -> None:
        """Once nobody needs it any more, nothing is left, here and there."""
        engine = self._engine
        for id in list(engine.jobs):
            engine.forget_job(id)
        self._taken.clear()
        for name in {label.split("@")[0] for label in engine.versions.labels()}:
            engine.unload_adapter(name)
        engine.flush_commands()
        self._device.execute(DescribeRanks())
        for rank in range(NUM_RANKS):
            held = self._instructions.held(rank)
            if any(held.values()):
                self.broken.append(f"rank {rank} still holds {held}")
        engine.cache.evict(engine.pool.num_pages)
        if engine.pool.num_free != engine.pool.num_pages or engine.stats().num_host_pages_used:
            self.broken.append(
                f"pages are left: {engine.pool.num_pages_by_owner()}, {engine.stats()}"
            )


def _kinds_of(what: str) -> tuple[str, ...]:
    """Return the names of the commands that a fault may hit."""
    match what:
        case "cannot read":
            return ("OpenVersion",)
        case "cannot write":
            return ("WriteCheckpoint",)
        case "has no memory":
            return _TAKE_MEMORY
    return (
        *_TAKE_MEMORY,
        "WriteCheckpoint",
        "OpenRequest",
        "CloseRequest",
        "DropPack",
        "DropVersion",
        "MovePages",
    )


def _submit(engine: TokenEngine, id: str, kind: str, checkpoint: Path | None = None) -> None:
    validation = examples_of((4, 8), 2) if kind == "validated" else ()
    engine.submit_examples(
        _EXAMPLES,
        JOBS[kind],
        adapter=None if checkpoint is not None else _ADAPTER,
        job_id=id,
        validation=validation,
        checkpoint=checkpoint,
    )


@cache
def _given_adapter() -> str:
    return adapter_directory(**_LORA)


@cache
def _reference(kind: str) -> dict[str, Any]:
    """Return what one process learns, undisturbed."""
    device = open_device(settings(1))
    latency = FixedLatency(roofline_profile(make_backbone("llama"), FAST))
    engine = TokenEngine(device, latency, EngineConfig(block_tokens=BLOCK, tpot_s=1.0))
    _submit(engine, "job", kind)
    while engine.has_work:
        engine.step()
    with TemporaryDirectory() as directory:
        engine.save_adapter("job", directory)
        return adapter_in(directory)


def run_rank_storm(seed: int, num_actions: int = NUM_ACTIONS) -> tuple[Counter[str], list[str]]:
    """Return what was done how often, and which promises were broken."""
    with TemporaryDirectory(prefix="coserve-storm-") as home:
        storm = RankStorm(Path(home), seed)
        try:
            storm.blow(num_actions)
            storm.look()
        finally:
            storm.close()
    return storm.done, storm.broken
