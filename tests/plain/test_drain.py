"""Nodes that leave: their jobs continue on others, each step once, whatever is wrong with
checkpoints and starts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cluster_nodes import ScriptedNode, cluster, make_job, make_request, num_ready, until
from msgspec.structs import replace

from coserve.cluster.nodes.messages import NodeStatus
from coserve.engine.commands import AddRequest, CancelJob, PauseJob, StartJob
from coserve.engine.jobs.events import JobEvent
from coserve.errors import ClusterError, JobOverError
from coserve.jobs.messages import Checkpointed
from coserve.protocol.messages import StepReport


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


class Lost:
    """An `EngineListener` that remembers jobs that were lost, and steps."""

    def __init__(self, link: Any) -> None:
        self.link, self.jobs, self.steps = link, list[frozenset[str]](), list[int]()
        link.listen(self)

    def engine_ready(self, ready: Any) -> None:
        pass

    def engine_gone(self) -> None:
        assert self.link.jobs_at_death == (), "nothing has died of it"
        self.jobs.append(self.link.jobs_lost)

    def engine_reported(self, report: StepReport) -> None:
        self.steps += [each.step for each in report.job_events]


def step(number: int) -> StepReport:
    return StepReport(job_events=[JobEvent(job="one", kind="step", step=number, now_s=0.0)])


def checkpoint(number: int, job: str = "one") -> StepReport:
    return StepReport(
        checkpoints=[Checkpointed(job=job, step=number, directory=f"/step-{number}", listed=False)]
    )


@pytest.mark.parametrize("has_older", [False, True])
def test_a_job_whose_last_steps_no_checkpoint_has_is_started_anew_by_those_who_forget_them(
    has_older: bool,
):
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            lost = Lost(link)
            await link.start_job(make_job("one"))
            if has_older:
                nodes[0].say(checkpoint(7))
            nodes[0].say(step(8))
            await until(lambda: lost.steps)
            await link.drain("node-0")  # the pause's own checkpoint is not written
            assert lost.jobs == [{"one"}]
            assert nodes[0].of(CancelJob) and not nodes[1].of(StartJob)
            assert link.waiting == [] and not any(each["jobs"] for each in link.describe())
            with pytest.raises(JobOverError):
                await link.pause_job("one")
            await link.start_job(make_job("one"))
            assert nodes[1].of(StartJob)

    run(test)


@pytest.mark.parametrize("resumed", [None, "/step-7"])
def test_a_job_that_has_made_no_step_yet_continues_elsewhere_from_where_it_began(
    resumed: str | None,
):
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            lost = Lost(link)
            await link.start_job(make_job("one", checkpoint=resumed))
            await link.drain("node-0")
            (started,) = nodes[1].of(StartJob)
            assert (started.job.checkpoint, lost.jobs) == (resumed, [])

    run(test)


def test_a_job_that_is_refused_where_it_moves_is_started_anew():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            lost = Lost(link)
            await link.start_job(make_job("one"))
            nodes[0].before_reply = lambda command: (
                isinstance(command, PauseJob) and nodes[0].say(checkpoint(7))
            )
            nodes[1].answers = lambda command: (
                "/step-7 cannot be read" if isinstance(command, StartJob) else None
            )
            await link.drain("node-0")
            assert lost.jobs == [{"one"}]
            assert not any(each["jobs"] for each in link.describe())

    run(test)


def test_a_job_that_cannot_be_paused_moves_all_the_same():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            lost = Lost(link)
            await link.start_job(make_job("one"))
            nodes[0].answers = lambda command: "no room" if isinstance(command, PauseJob) else None
            await link.drain("node-0")
            assert lost.jobs == [{"one"}]
            assert nodes[0].of(CancelJob)

    run(test)


def test_a_machine_leaves_with_all_its_nodes_at_once():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            ids = ("one", "two", "three")
            for id in ids:
                await link.start_job(make_job(id))
            await link.drain("node-0", "node-1")
            assert {each.job.id for each in nodes[2].of(StartJob)} == {*ids}
            assert [len(each.of(StartJob)) for each in nodes[:2]] == [1, 1], (
                "no job has moved to the other"
            )
            for number in range(3):
                link.open([make_request(str(number))])
            await until(lambda: len(nodes[2].of(AddRequest)) == 3)

    run(test)


def test_nodes_of_which_one_is_not_there_do_not_drain():
    async def test() -> None:
        async with cluster(ScriptedNode()) as link:
            with pytest.raises(ClusterError, match="there is no node 'node-7'; there are node-0"):
                await link.drain("node-0", "node-7")
            assert [each["state"] for each in link.describe()] == ["ready"]

    run(test)


class Moving(ScriptedNode):
    """One that Ray starts again on another machine; in containers, its process has the same number
    there."""

    machine = "here"

    async def describe(self) -> NodeStatus:
        return replace(await super().describe(), machine=self.machine)


def test_a_node_that_has_come_back_on_another_machine_does_not_drain():
    async def test() -> None:
        node = Moving()
        async with cluster(node) as link:
            await until(lambda: link.describe()[0]["machine"] == "here")
            await link.drain("node-0")
            node.die()
            await until(lambda: link.describe()[0]["problem"])
            node.machine = "there"
            node.live()
            await until(lambda: num_ready(link) == 1)
            assert link.describe()[0]["machine"] == "there"

    run(test)
