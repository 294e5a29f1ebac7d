"""Jobs that wait for a node, and requests between their placement and their start."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_nodes import ScriptedNode, cluster, make_job, until
from cluster_views import make_node

from coserve.cluster.jobs.placed_jobs import PlacedJobs
from coserve.cluster.placement import make_placement
from coserve.cluster.scheduler import ClusterScheduler
from coserve.engine.commands import JobStart, PauseJob, ResumeJob, StartJob
from coserve.errors import JobOverError
from coserve.jobs.messages import Checkpointed
from coserve.protocol.messages import StepReport


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


class Engine:
    """An `EngineLink` as far as jobs use it: it knows those that were started. said: by whom it was
    asked what."""

    def __init__(self) -> None:
        self.said = list[tuple[str, bool]]()
        self._known = set[str]()

    async def start_job(self, job: JobStart) -> None:
        self.said.append(("start", job.paused))
        self._known.add(job.id)

    async def pause_job(self, id: str) -> None:
        self._say("pause", id)

    async def resume_job(self, id: str) -> None:
        self._say("resume", id)

    async def cancel_job(self, id: str, *, keeps: bool = True) -> None:
        self._say("cancel", id)

    def _say(self, what: str, id: str) -> None:
        self.said.append((what, False))
        if id not in self._known:
            raise JobOverError(f"there is no job {id}")


class Waiting:
    """The job "one", which waits for a node."""

    def __init__(self) -> None:
        self.engines = {"n0": Engine(), "n1": Engine()}
        self._nodes: dict[str, Any] = {
            name: SimpleNamespace(link=each) for name, each in self.engines.items()
        }
        self._scheduler = ClusterScheduler(make_placement("round-robin"))
        self.jobs = PlacedJobs(self._scheduler, self._place, lambda event: None)

    def come(self, name: str, **view: Any) -> None:
        """A node is there, or tells that it has changed; what waits is placed, and nothing is sent
        yet."""
        self._scheduler.report(make_node(name, **view))
        self._place()

    @property
    def num_tasks(self) -> list[int]:
        return [node.num_tasks for node in self._scheduler.view(0.0).nodes]

    def _place(self) -> None:
        for task, placed in self._scheduler.place(0.0):
            self.jobs.assigned(task.id, self._nodes[placed.node])


@asynccontextmanager
async def just_placed() -> Any:
    """Yield a job that is placed on n0 and not sent yet. At the end, all that is to be sent has
    been.
    """
    made = Waiting()
    await made.jobs.start(make_job("one"))
    made.come("n0")
    assert made.jobs.node_of("one") is not None and not made.engines["n0"].said
    yield made
    await asyncio.sleep(0.15)


def test_a_job_that_waited_is_started_when_it_has_a_node():
    async def test() -> None:
        async with just_placed() as made:
            pass
        assert made.engines["n0"].said == [("start", False)]

    run(test)


def test_a_job_that_is_cancelled_before_its_node_has_heard_of_it_is_never_started():
    async def test() -> None:
        async with just_placed() as made:
            await made.jobs.cancel("one")
        assert made.engines["n0"].said == []
        assert made.num_tasks == [0]
        with pytest.raises(JobOverError):
            await made.jobs.cancel("one")

    run(test)


def test_a_job_that_is_paused_before_its_node_has_heard_of_it_starts_when_it_is_resumed():
    async def test() -> None:
        async with just_placed() as made:
            await made.jobs.pause("one")
            await asyncio.sleep(0.15)
            assert made.engines["n0"].said == []
            assert made.num_tasks == [0]
            await made.jobs.resume("one")
        assert made.engines["n0"].said == [("start", False)]

    run(test)


def test_a_job_whose_node_drains_before_it_has_heard_of_it_is_placed_elsewhere():
    async def test() -> None:
        async with just_placed() as made:
            made.come("n1")
            made.come("n0", is_draining=True)
            await made.jobs.move("one")
        assert [each.said for each in made.engines.values()] == [[], [("start", False)]]
        assert made.num_tasks == [0, 1]

    run(test)


def test_a_job_that_was_started_paused_and_is_resumed_while_it_waits_trains_on_its_node():
    async def test() -> None:
        made = Waiting()
        await made.jobs.start(make_job("one", paused=True))
        await made.jobs.resume("one")
        made.come("n0")
        await asyncio.sleep(0.15)
        assert made.engines["n0"].said == [("start", False)]

    run(test)


def test_a_job_that_was_started_paused_rests_where_it_moves():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            await link.start_job(make_job("one", paused=True))
            nodes[0].before_reply = lambda command: (
                isinstance(command, PauseJob)
                and nodes[0].say(
                    StepReport(
                        checkpoints=[
                            Checkpointed(job="one", step=7, directory="/step-7", listed=False)
                        ]
                    )
                )
            )
            await link.drain("node-0")
            (started,) = nodes[1].of(StartJob)
            assert started.job.paused
            await link.resume_job("one")
            await until(lambda: nodes[1].of(ResumeJob))

    run(test)
