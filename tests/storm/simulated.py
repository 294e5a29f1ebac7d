"""Storms in virtual time: seeded operations and faults on a modelled device, every invariant
checked after each."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from storm import checks
from storm.faults import FAULTS
from storm.operations import BESIDE_A_STEP, OPERATIONS, RARE, start_lost_jobs
from storm.world import World, calm_policy

# Actions of the engine on its device in one storm, before it is left to come to its end.
NUM_ACTIONS = 2000
_MOST_CALM_STEPS = 50_000


@dataclass(kw_only=True)
class Report:
    """Of some storms. counts: of operations, endings, faults."""

    num_storms: int = 0
    simulated_s: float = 0.0
    computed_s: float = 0.0
    num_actions: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)

    def as_text(self) -> str:
        """In lines of Markdown."""
        hours, computed_hours = self.simulated_s / 3600, self.computed_s / 3600
        lines = [
            f"{self.num_storms:,} storms: {hours:,.1f} hours of virtual time in "
            f"{computed_hours:,.2f} of computing "
            f"({hours / max(1e-9, computed_hours):,.0f} an hour); {self.num_actions:,} actions on "
            f"the device, "
            f"{self.faults.total():,} of them hit by a fault, {self.operations.total():,} "
            f"operations"
        ]
        for name, counts in (
            ("operations", self.operations),
            ("faults", self.faults),
            ("what came of it", self.counts),
            ("storms by policy", self.policies),
        ):
            lines.append(
                f"- {name}: "
                + ", ".join(f"{key} {number:,}" for key, number in counts.most_common())
            )
        return "\n".join(lines)


def command(seed: int, num_actions: int) -> str:
    """What repeats a storm."""
    return f"PYTHONPATH=tests {sys.executable} -m storm simulated --seed {seed} --actions {num_actions}"


def run_storm(seed: int, report: Report, *, num_actions: int = NUM_ACTIONS) -> World:
    """One storm, which joins the report; AssertionError where an invariant is broken, with the
    command that repeats it.
    """
    started_s = time.perf_counter()
    with TemporaryDirectory(prefix="coserve-storm-") as home, _refcounts_alone():
        world = World(seed, Path(home))
        try:
            _rage(world, num_actions)
            _calm(world)
        except Exception as error:
            error.add_note(
                f"repeat it with: {command(seed, num_actions)}   ({world.setting}, at "
                f"{world.clock.now():.3f} s)"
            )
            raise
    _add(report, world, time.perf_counter() - started_s)
    return world


def _rage(world: World, num_actions: int) -> None:
    """Operations and faults, in weather that changes: how often each comes, and which faults there
    are."""
    rng, clock = world.rng, world.clock
    weather_until, next_s = 0, 0.0
    operation_s = 1.0
    while (done := world.num_actions + world.device.num_actions) < num_actions:
        if done >= weather_until:
            weather_until = done + rng.choice((20, 100, 500))
            operation_s = rng.choice((0.02, 0.2, 1.0, 10.0))
            world.set_faults(
                rng.choice((0.0, 0.01, 0.05, 0.2)),
                rng.sample(list(FAULTS), rng.choice((1, 4, len(FAULTS), len(FAULTS)))),
            )
            next_s = clock.now()
        if clock.now() >= next_s:
            next_s = clock.now() + rng.expovariate(1 / operation_s)
            _operate(world)
        elif not _turn(world):
            clock.advance(max(1e-6, min(next_s - clock.now(), 1.0)))
        _check(world)


def _operate(world: World) -> None:
    found = RARE if world.rng.random() < 0.003 else OPERATIONS
    (operation,) = world.rng.choices(list(found), weights=list(found.values()))
    world.counts[f"operation {operation.__name__}"] += 1
    world.attempt(lambda: operation(world))


def _turn(world: World) -> bool:
    """A step, if there is work; returns whether time has moved."""
    engine = world.engine
    if not engine.has_work:
        return False
    before_s = world.clock.now()

    def step() -> None:
        if world.rng.random() < 0.95:
            world.take(engine.step())
            return
        if engine.begin_step():
            world.rng.choice(BESIDE_A_STEP)(world)
        world.take(engine.finish_step())

    world.attempt(step)
    _check_ended_jobs(world)
    return world.clock.now() > before_s


def _check_ended_jobs(world: World) -> None:
    """Each once, when its end has been told."""
    while world.ended:
        job = world.ended.pop()
        if job.id in world.engine.jobs and job.state == "succeeded":
            for check in checks.OF_A_JOB:
                check(world, job)


def _check(world: World) -> None:
    for check in checks.ALWAYS:
        check(world)


def _calm(world: World) -> None:
    """No more faults: everything comes to its end."""
    world.set_faults(0.0)
    calm_policy(world)
    for name in [
        name
        for name, asked in world.asked.items()
        if not asked.is_finished and world.rng.random() < 0.5
    ]:
        world.asked[name].was_cancelled = True
        # The last fault may have ended the device's process while a failed step was cleared away.
        world.attempt(partial(world.engine.cancel, name))
    for _ in range(2):  # likewise: then the first attempt finds that out
        world.attempt(partial(start_lost_jobs, world))
    assert not world.lost, "a job could not be started again"
    for number in range(_MOST_CALM_STEPS):
        # By the engine's word: a pause may hold though its caller was interrupted.
        for job in [job for job in world.engine.jobs.values() if job.state == "paused"]:
            world.engine.resume_job(job.id)
            world.jobs[job.id].state = "running"
        if not world.engine.has_work:
            break
        if not _turn(world):
            world.clock.advance(0.01)
        if number % 16 == 0:
            _check(world)
    else:
        raise AssertionError(f"there is no end: {world.engine.stats()}")
    for check in checks.AT_THE_END:
        check(world)


@contextmanager
def _refcounts_alone() -> Iterator[None]:
    """When copies are let go of must not depend on the garbage collector's moments."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _add(report: Report, world: World, computed_s: float) -> None:
    report.num_storms += 1
    report.simulated_s += world.elapsed_s
    report.computed_s += computed_s
    report.num_actions += world.num_actions + world.device.num_actions
    report.faults += world.hits + world.device.hits
    report.policies[world.setting.policy] += 1
    world.count_copies()
    for name, number in world.counts.items():
        if name.startswith("operation "):
            report.operations[name.removeprefix("operation ")] += number
        else:
            report.counts[name] += number
