"""Many nodes as one engine: what becomes of requests and jobs when nodes join, differ and die."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cluster_nodes import READY, ScriptedNode, cluster, make_job, make_request, num_ready, until
from msgspec.structs import replace

from coserve.cluster.nodes.messages import CommandBatch, NodeStatus
from coserve.engine.commands import (
    AdapterRef,
    AddRequest,
    CancelJob,
    CancelRequest,
    LoadAdapter,
    PauseJob,
    ResumeJob,
    StartJob,
    UnloadAdapter,
)
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError, ClusterError, EngineGoneError, JobOverError
from coserve.jobs.messages import Checkpointed
from coserve.protocol.messages import StepReport, decode_command
from coserve.tuning.shard import DataParallel


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


class Heard:
    """An `EngineListener` that remembers."""

    def __init__(self, link: Any) -> None:
        self.link, self.said, self.events, self.checkpoints = (
            link,
            list[Any](),
            list[Any](),
            list[Any](),
        )
        link.listen(self)

    def engine_ready(self, ready: Any) -> None:
        self.said.append("ready")

    def engine_gone(self) -> None:
        self.said.append(("gone", self.link.jobs_lost, self.link.jobs_at_death))

    def engine_reported(self, report: StepReport) -> None:
        self.events += report.job_events
        self.checkpoints += report.checkpoints


async def read(stream: Any) -> list[int]:
    return [token async for batch in stream.batches() for chunk in batch for token in chunk.tokens]


def test_requests_are_placed_and_answered():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            streams = [link.open([make_request(id)]) for id in ("a", "b")]
            for node, id in zip(nodes, ("a", "b"), strict=True):
                await until(lambda node=node: node.of(AddRequest))  # type: ignore[misc]
                assert [each.id for each in node.of(AddRequest)] == [id]
                node.answer(id, 5)
                node.answer(id, 6, finish="stop")
            assert [await read(stream) for stream in streams] == [[5, 6], [5, 6]]
            assert link.num_open == 0

    run(test)


@pytest.mark.parametrize("whole_node", [True, False])
def test_without_a_token_a_request_is_tried_elsewhere_and_with_one_it_ends_with_an_error(
    whole_node: bool,
):
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            first, second, third = (link.open([make_request(id)]) for id in ("a", "b", "c"))
            await until(lambda: len(nodes[0].of(AddRequest)) == 2)
            nodes[0].answer("a", 5)
            batches = first.batches()
            assert [chunk.tokens for chunk in await anext(batches)] == [(5,)]
            for node in nodes:
                node.answers_requests = True
            if whole_node:
                nodes[0].die()
            else:
                nodes[0].lose_engine()
            with pytest.raises(
                EngineGoneError, match="node-0 was lost after 1 tokens of this answer; ask again"
            ):
                await anext(batches)
            nodes[1].answer("b", 7, finish="stop")
            assert [await read(second), await read(third)] == [[7], [7]]

    run(test)


def test_a_request_that_nodes_die_of_does_not_end_them_all():
    async def test() -> None:
        nodes = [ScriptedNode() for _ in range(5)]
        async with cluster(*nodes) as link:
            stream = link.open([make_request("a")])
            reading = asyncio.create_task(read(stream))
            while not reading.done():
                for node in nodes:
                    if node.of(AddRequest) and node.is_alive:
                        node.die()
                await asyncio.sleep(0.01)
            with pytest.raises(EngineGoneError, match="3 nodes were lost, one after the other"):
                await reading
            assert sum(node.is_alive for node in nodes) == 2

    run(test)


def test_a_request_that_is_not_wanted_any_more_is_cancelled_where_it_is():
    async def test() -> None:
        node = ScriptedNode()
        async with cluster(node) as link:
            stream = link.open([make_request("a")])
            await until(lambda: node.of(AddRequest))
            link.close(stream)
            assert [each.id for each in await until(lambda: node.of(CancelRequest))] == ["a"]
            assert link.num_open == 0

    run(test)


def test_a_node_that_dies_is_used_again_when_it_lives():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            nodes[1].die()
            await until(lambda: num_ready(link) == 1)
            nodes[1].live()
            await until(lambda: num_ready(link) == 2)
            nodes[0].die()
            nodes[1].die()
            await until(lambda: num_ready(link) == 0)
            with pytest.raises(EngineGoneError, match="no node is ready"):
                link.open([make_request("a")])

    run(test)


class NodeSlowToDescribe(ScriptedNode):
    """A node whose calls for its status, made when it died, are answered after `is_heard`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_heard = asyncio.Event()
        self.num_asked_in_vain = 0

    async def describe(self) -> NodeStatus:
        try:
            return await super().describe()
        except EngineGoneError:
            self.num_asked_in_vain += 1
            await self.is_heard.wait()
            raise


def test_what_a_node_says_of_itself_is_of_the_process_that_lives():
    async def test() -> None:
        node = NodeSlowToDescribe()
        async with cluster(ScriptedNode(), node) as link:
            await until(lambda: link.describe()[1]["pid"] == 1)
            await link.drain("node-1")
            node.die()
            await until(lambda: node.num_asked_in_vain)
            node.live()
            await until(lambda: "node-1" in {each.id for each in link.view.nodes})
            node.is_heard.set()
            found = await until(lambda: link.describe()[1]["pid"] == 2 and link.describe()[1])
            assert (found["state"], found["problem"]) == (
                "ready",
                None,
            )  # it left, and has come back

    run(test)


class NodeSlowWhenBack(ScriptedNode):
    """A node whose status is answered after `is_heard` when it is back, and whose engine is used
    before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_slow, self.num_asked = False, 0
        self.is_asked, self.is_heard = asyncio.Event(), asyncio.Event()

    async def describe(self) -> NodeStatus:
        found = await super().describe()
        self.num_asked += 1
        if self.is_slow:
            self.is_asked.set()
            await self.is_heard.wait()
        return found

    async def attach(self, session: str) -> None:
        if self.is_slow:
            await self.is_asked.wait()
        await super().attach(session)


def test_a_node_drains_that_was_asked_how_it_is_before_that_and_answers_after_it():
    async def test() -> None:
        node = NodeSlowWhenBack()
        async with cluster(ScriptedNode(), node) as link:
            await until(lambda: link.describe()[1]["pid"] == 1)
            node.die()
            node.is_slow = True
            await until(lambda: "node-1" not in {each.id for each in link.view.nodes})
            node.live()
            await until(lambda: "node-1" in {each.id for each in link.view.nodes})
            await link.drain("node-1")
            asked, node.is_slow = node.num_asked, False
            node.is_heard.set()
            await until(lambda: link.describe()[1]["pid"] == 2 and node.num_asked > asked)
            assert link.describe()[1]["state"] == "draining"

    run(test)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_node_drains_that_came_back_just_before(leaves: bool):
    """The front has the status of the node's old process; the new one has not left since, or has
    once more.
    """

    async def test() -> None:
        node = NodeSlowToDescribe()
        async with cluster(ScriptedNode(), node) as link:
            await until(lambda: link.describe()[1]["pid"] == 1)
            node.die()
            await until(lambda: node.num_asked_in_vain)
            node.live()
            await until(lambda: "node-1" in {each.id for each in link.view.nodes})
            await link.drain("node-1")
            if leaves:
                node.die()
                await until(lambda: "node-1" not in {each.id for each in link.view.nodes})
                node.live()
                await until(lambda: "node-1" in {each.id for each in link.view.nodes})
            node.is_heard.set()
            pid = 3 if leaves else 2
            found = await until(lambda: link.describe()[1]["pid"] == pid and link.describe()[1])
            assert found["state"] == ("ready" if leaves else "draining")

    run(test)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            lambda: ScriptedNode(replace(READY, model="other")),
            "its model is other, and that of others tiny",
        ),
        (lambda: ScriptedNode(replace(READY, dtype="bfloat16")), "its dtype is bfloat16"),
        (lambda: ScriptedNode(version="0.0.1"), "it runs coserve 0.0.1"),
        (lambda: ScriptedNode(error="no such model"), "no such model"),
    ],
)
def test_a_node_that_differs_is_not_used_and_says_why(wrong: Callable[[], ScriptedNode], why: str):
    async def test() -> None:
        nodes = ScriptedNode(), wrong()
        async with cluster(*nodes, ready=1) as link:
            found = await until(
                lambda: [each["problem"] for each in link.describe() if each["problem"]]
            )
            assert why in found[0]
            for number in range(3):
                link.open([make_request(str(number))])
            await until(lambda: len(nodes[0].of(AddRequest)) == 3)
            assert not nodes[1].of(AddRequest)

    run(test)


def test_jobs_of_a_dead_node_are_told_to_be_lost_and_others_are_not():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            heard = Heard(link)
            for id in ("one", "two"):
                await link.start_job(make_job(id))
            assert [[each.job.id for each in node.of(StartJob)] for node in nodes] == [
                ["one"],
                ["two"],
            ]
            nodes[1].lose_engine(jobs_at_death=("two",))
            await until(lambda: len(heard.said) == 4)
            assert heard.said == ["ready", ("gone", {"two"}, ("two",)), "ready", "ready"]
            with pytest.raises(JobOverError):
                await link.pause_job("two")
            await link.pause_job("one")
            assert nodes[0].of(PauseJob)

    run(test)


def test_what_a_node_says_of_a_job_that_is_not_its_own_is_dropped():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            heard = Heard(link)
            await link.start_job(make_job("one"))
            for node in (nodes[1], nodes[0]):
                events = [JobEvent(job="one", kind="step", step=1, now_s=0.0)]
                checkpoints = [Checkpointed(job="one", step=1, directory="/none", listed=False)]
                node.say(StepReport(job_events=events, checkpoints=checkpoints))
                await asyncio.sleep(0.05)
            await until(lambda: heard.events)
            assert len(heard.events) == len(heard.checkpoints) == 1
            nodes[0].say(
                StepReport(job_events=[JobEvent(job="one", kind="succeeded", step=2, now_s=0.0)])
            )
            await until(lambda: len(heard.events) == 2)
            with pytest.raises(JobOverError):
                await link.cancel_job("one")

    run(test)


def test_a_job_is_cancelled_where_it_is():
    async def test() -> None:
        node = ScriptedNode()
        async with cluster(node) as link:
            await link.start_job(make_job("one"))
            await link.cancel_job("one")
            assert [each.id for each in node.of(CancelJob)] == ["one"]
            assert link.waiting == []

    run(test)


def test_an_adapter_that_one_node_cannot_read_is_loaded_on_none():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        nodes[1].answers = lambda command: (
            "/a is missing" if isinstance(command, LoadAdapter) else None
        )
        async with cluster(*nodes) as link:
            with pytest.raises(
                AdapterError,
                match=r"/a is missing \(on the node node-1: every node must be able to",
            ):
                await link.load_adapter(AdapterRef(name="a", directory="/a"))
            assert all(node.of(UnloadAdapter) for node in nodes)
            nodes[1].answers = lambda command: None
            await link.load_adapter(AdapterRef(name="a", directory="/a"))

    run(test)


def test_what_only_a_job_has_is_asked_of_its_node():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            await link.start_job(make_job("one"))
            for number in range(4):
                link.open([make_request(str(number), adapter=AdapterRef(name="ft:one"))])
            await until(lambda: len(nodes[0].of(AddRequest)) == 4)
            assert not nodes[1].of(AddRequest)

    run(test)


def of_live_job(id: str) -> AddRequest:
    return make_request(id, adapter=AdapterRef(name="ft:one"))


def test_what_waits_for_a_live_job_follows_it_when_its_node_drains():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            await link.start_job(make_job("one"))

            def before_reply(command: Any) -> None:
                if isinstance(command, PauseJob):  # its node drains, and the job has no other yet
                    link.open([of_live_job("a")])
                    checkpoint = Checkpointed(job="one", step=7, directory="/step-7", listed=False)
                    nodes[0].say(StepReport(checkpoints=[checkpoint]))

            nodes[0].before_reply = before_reply
            await link.drain("node-0")
            await until(lambda: nodes[1].of(AddRequest))
            assert [type(each) for each in nodes[1].commands] == [StartJob, AddRequest], (
                "when that node has the job"
            )
            assert not nodes[0].of(AddRequest)

    run(test)


def test_what_is_asked_of_a_live_job_that_is_lost_ends_with_an_error():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            await link.start_job(make_job("one"))
            sent = link.open([of_live_job("a")])
            await until(lambda: nodes[0].of(AddRequest))
            waiting = list[Any]()

            def before_reply(command: Any) -> None:
                if isinstance(command, PauseJob):
                    waiting.append(link.open([of_live_job("b")]))
                    nodes[0].lose_engine(("one",))

            nodes[0].before_reply = before_reply
            await link.drain("node-0")
            for stream in (sent, waiting[0], link.open([of_live_job("c")])):
                with pytest.raises(
                    EngineGoneError,
                    match="job that trains ft:one is restarting, or is over; ask again",
                ):
                    await read(stream)
            assert link.num_open == 0
            assert not nodes[1].of(AddRequest)

    run(test)


def test_a_job_is_cancelled_whose_end_was_told_though_its_node_dies_before_the_reply():
    async def test() -> None:
        node = ScriptedNode()
        async with cluster(node) as link:
            heard = Heard(link)
            await link.start_job(make_job("one"))

            def before_reply(command: Any) -> None:
                if isinstance(command, CancelJob):
                    end = JobEvent(job="one", kind="cancelled", step=3, now_s=0.0)
                    node.say(StepReport(job_events=[end]))
                    node.lose_engine(("one",))

            node.before_reply = before_reply
            await link.cancel_job("one")
            assert [event.kind for event in heard.events] == ["cancelled"]
            assert link.jobs_lost == frozenset()

    run(test)


def say_succeeded(node: ScriptedNode, directory: str) -> None:
    """Report the last checkpoint of the job "one", and its end."""
    checkpoint = Checkpointed(job="one", step=9, directory=directory, listed=True)
    end = JobEvent(job="one", kind="succeeded", step=9, now_s=0.0)
    node.say(StepReport(checkpoints=[checkpoint], job_events=[end]))


def test_who_asks_for_what_a_live_job_has_served_when_that_has_just_succeeded_gets_it_from_disk():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            heard = Heard(link)
            await link.start_job(make_job("one"))

            def before_reply(command: Any) -> None:
                # Its node drains: what is asked of the job waits, and then it is over.
                if isinstance(command, PauseJob):
                    link.open([of_live_job("waits")])
                    say_succeeded(nodes[0], "/step-9")

            nodes[0].before_reply = before_reply
            await link.drain("node-0")
            await until(lambda: heard.events)
            link.open([of_live_job("late")])
            await until(lambda: len(nodes[1].of(AddRequest)) == 2)
            found = {each.id: each.adapter for each in nodes[1].of(AddRequest)}
            assert found == dict.fromkeys(
                ("waits", "late"), AdapterRef(name="ft:one", directory="/step-9")
            )

            await link.start_job(make_job("one"))  # the name is another's now
            nodes[1].say(
                StepReport(job_events=[JobEvent(job="one", kind="failed", step=0, now_s=0.0)])
            )
            await until(lambda: len(heard.events) == 2)
            with pytest.raises(
                EngineGoneError, match="job that trains ft:one is restarting, or is over; ask again"
            ):
                await read(link.open([of_live_job("failed")]))

    run(test)


def test_what_a_divided_job_has_served_is_there_when_it_has_just_succeeded():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            heard = Heard(link)
            await link.start_job(make_job("one", data_parallel=DataParallel(num_nodes=2)))
            await until(lambda: all(node.of(StartJob) for node in nodes))
            shards = [node.of(StartJob)[0].job.id for node in nodes]
            checkpoint = Checkpointed(job=shards[0], step=9, directory="/step-9", listed=True)
            nodes[0].say(StepReport(checkpoints=[checkpoint]))
            for node, shard in zip(nodes, shards, strict=True):
                node.say(
                    StepReport(
                        job_events=[JobEvent(job=shard, kind="succeeded", step=9, now_s=0.0)]
                    )
                )
            await until(lambda: heard.events)
            link.open([of_live_job("late")])
            (sent,) = await until(lambda: nodes[0].of(AddRequest) + nodes[1].of(AddRequest))
            assert sent.adapter == AdapterRef(name="ft:one", directory="/step-9")

    run(test)


class SlowNode(ScriptedNode):
    """A node that takes starts of jobs when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.hears = asyncio.Event()

    async def send(self, session: str, batch: CommandBatch) -> None:
        if any(isinstance(decode_command(each), StartJob) for each in batch.commands):
            await self.hears.wait()
        await super().send(session, batch)


def test_a_divided_job_rests_only_when_all_its_nodes_have_read_what_they_begin_with():
    """The first node's checkpoint takes the place of that one, which is removed."""

    async def test() -> None:
        nodes = ScriptedNode(), SlowNode()
        async with cluster(*nodes) as link:
            await link.start_job(
                make_job("one", data_parallel=DataParallel(num_nodes=2), checkpoint="/step-1")
            )
            pausing = asyncio.create_task(link.pause_job("one"))
            await asyncio.sleep(0.3)
            assert not nodes[0].of(PauseJob)
            nodes[1].hears.set()
            await pausing
            assert [len(node.of(PauseJob)) for node in nodes] == [1, 1]

    run(test)


def test_times_are_this_machines():
    async def test() -> None:
        node = ScriptedNode()  # whose clock always shows 0
        async with cluster(node) as link:
            heard = Heard(link)
            await link.start_job(make_job("one"))
            before_s = asyncio.get_running_loop().time()
            node.say(StepReport(job_events=[JobEvent(job="one", kind="step", step=1, now_s=0.0)]))
            await until(lambda: heard.events)
            assert abs(heard.events[0].now_s - before_s) < 60

    run(test)


def test_a_node_drains_and_its_jobs_continue_elsewhere_from_their_checkpoints():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            heard = Heard(link)
            await link.start_job(make_job("one"))
            stream = link.open([make_request("a")])
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
            assert [each.id for each in nodes[0].of(CancelJob)] == ["one"]
            (started,) = nodes[1].of(StartJob)
            assert (started.job.id, started.job.checkpoint, started.job.paused) == (
                "one",
                "/step-7",
                False,
            )
            assert [each.directory for each in heard.checkpoints] == [
                "/step-7"
            ]  # told once, and no end of the job
            nodes[0].say(
                StepReport(job_events=[JobEvent(job="one", kind="cancelled", step=7, now_s=0.0)])
            )
            nodes[1].say(
                StepReport(job_events=[JobEvent(job="one", kind="step", step=8, now_s=0.0)])
            )
            await until(lambda: heard.events)
            assert [each.step for each in heard.events] == [8]
            for number in range(3):
                link.open([make_request(str(number))])
            await until(lambda: len(nodes[1].of(AddRequest)) == 4)
            nodes[1].answer("a", 7, finish="stop")
            assert await read(stream) == [7]
            assert [each["state"] for each in link.describe()] == ["draining", "ready"]
            with pytest.raises(
                ClusterError, match="there is no node 'other'; there are node-0, node-1"
            ):
                await link.drain("other")

    run(test)


def test_a_job_that_rests_moves_and_rests_there():
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            await link.start_job(make_job("one"))
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
            await link.pause_job("one")
            await link.drain("node-0")
            (started,) = nodes[1].of(StartJob)
            assert started.job.paused
            await link.resume_job("one")
            assert nodes[1].of(ResumeJob)

    run(test)
