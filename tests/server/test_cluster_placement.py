"""Views of nodes reach the placement, and its decisions reach the nodes: with scripted nodes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cluster_nodes import (
    READY,
    ScriptedNode,
    cluster,
    make_job,
    make_request,
    make_stats,
    make_step,
    until,
)
from msgspec.structs import replace

from coserve.cluster.placement import placement_names
from coserve.engine.commands import AdapterRef, AddRequest, StartJob
from coserve.protocol.messages import StepReport
from coserve.scheduling.fairness import TokenWeights

BIG = replace(READY, num_pages=1000)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


def nodes_of(number: int) -> list[ScriptedNode]:
    return [ScriptedNode(BIG) for _ in range(number)]


def tell(node: ScriptedNode, **stats: Any) -> None:
    """Report a step that has just ended."""
    told = make_stats(**{"num_pages": 1000, "num_pages_for_requests": 1000, **stats})
    node.say(StepReport(steps=[make_step(0.0, 0.01)], stats=told))


async def read(stream: Any) -> list[int]:
    return [token async for batch in stream.batches() for chunk in batch for token in chunk.tokens]


def ids(node: ScriptedNode) -> list[str]:
    return [each.id for each in node.of(AddRequest)]


@pytest.mark.parametrize("placement", placement_names())
def test_every_placement_serves_and_trains(placement: str):
    async def test() -> None:
        nodes = nodes_of(3)
        for node in nodes:
            node.answers_requests = True
        async with cluster(*nodes, placement=placement) as link:
            for id in ("one", "two"):
                await link.start_job(make_job(id))
            streams = [link.open([make_request(str(number))]) for number in range(6)]
            assert [await read(stream) for stream in streams] == [[7]] * 6
            started = await until(
                lambda: [each.job.id for node in nodes for each in node.of(StartJob)]
            )
            assert sorted(started) == ["one", "two"]
            assert link.waiting == []
            if placement.startswith("separate"):
                assert not any(node.of(AddRequest) and node.of(StartJob) for node in nodes)

    run(test)


def test_placements_see_what_nodes_told():
    async def test() -> None:
        nodes = nodes_of(2)
        async with cluster(*nodes, placement="slack-affinity") as link:
            tell(nodes[1], num_running=4, num_waiting=3, num_pages_for_requests=70, slack=0.25)
            await until(lambda: link.view.nodes[1].num_running)
            first, second = link.view.nodes
            assert (first.num_free_pages, first.slack, first.profile.forward.seconds(100) > 0) == (
                1000,
                1.0,
                True,
            )
            assert (second.num_free_pages, second.slack, second.num_waiting) == (70, 0.25, 3)
            assert second.profile == first.profile and second.hardware == "slow one"
            node = link.describe()[1]
            assert (node["slack"], node["free_pages"]) == (0.25, 0)

    run(test)


def test_training_goes_where_slos_leave_time():
    async def test() -> None:
        nodes = nodes_of(3)
        async with cluster(*nodes, placement="slack-affinity") as link:
            for node, slack in zip(nodes, (0.0, 0.7, 0.1), strict=True):
                tell(node, num_running=1, slack=slack)
            await until(lambda: [node.slack for node in link.view.nodes] == [0.0, 0.7, 0.1])
            await link.start_job(make_job("one"))
            assert [len(node.of(StartJob)) for node in nodes] == [0, 1, 0]

    run(test)


@pytest.mark.parametrize("placement", ["lemix", "slack-affinity"])
def test_requests_go_where_there_is_memory(placement: str):
    async def test() -> None:
        nodes = nodes_of(3)
        async with cluster(*nodes, placement=placement) as link:
            for node, pages in zip(nodes, (20, 50, 900), strict=True):
                tell(node, num_running=1, num_pages_for_requests=pages)
            await until(lambda: [node.num_free_pages for node in link.view.nodes] == [20, 50, 900])
            link.open([make_request("a")])
            await until(lambda: ids(nodes[2]) == ["a"])

    run(test)


def test_a_prompt_goes_where_its_beginning_is_and_an_adapter_where_it_is():
    async def test() -> None:
        nodes = nodes_of(2)
        async with cluster(*nodes, placement="slack-affinity") as link:
            prompt, adapter = list(range(90)), AdapterRef(name="a", directory="/a")
            streams = [link.open([make_request("other", prompt=[5] * 90)])]
            await until(lambda: ids(nodes[0]) == ["other"])
            streams.append(link.open([make_request("first", prompt=prompt, adapter=adapter)]))
            await until(lambda: ids(nodes[1]) == ["first"])
            for node, id in zip(nodes, ("other", "first"), strict=True):
                node.answer(id, 7, finish="stop")
            assert [await read(stream) for stream in streams] == [[7], [7]]
            later = [
                make_request("same", prompt=[*prompt, 1, 2], adapter=adapter),
                make_request("new", prompt=[9] * 90, adapter=adapter),
                make_request("again", prompt=[5] * 90),
            ]
            for request, node in zip(later, (nodes[1], nodes[1], nodes[0]), strict=True):
                stream = link.open([request])
                await until(lambda node=node, id=request.id: id in ids(node))  # type: ignore[misc]
                node.answer(request.id, 7, finish="stop")
                assert await read(stream) == [7]

    run(test)


def test_a_request_is_bound_when_a_node_is_about_to_need_one():
    async def test() -> None:
        (node,) = nodes_of(1)
        async with cluster(node, placement="slack-affinity") as link:
            for id in "abcdef":
                link.open([make_request(id)])
            await until(lambda: ids(node) == ["a", "b", "c", "d"])
            assert link.waiting == ["e", "f"]
            node.answer("a", 7)  # no report of its queue is needed to know that it has begun
            await until(lambda: ids(node) == ["a", "b", "c", "d", "e"])
            assert link.waiting == ["f"]

    run(test)


def test_a_request_that_ends_without_a_token_leaves_its_place_to_the_next_at_once():
    async def test() -> None:
        (node,) = nodes_of(1)
        waiting = list[list[str]]()

        class Listener:
            def engine_ready(self, ready: Any) -> None: ...

            def engine_gone(self) -> None: ...

            def engine_reported(self, report: StepReport) -> None:
                asyncio.get_running_loop().call_soon(lambda: waiting.append(link.waiting))

        async with cluster(node, placement="slack-affinity", most_prompts=1) as link:
            streams = [link.open([make_request(id)]) for id in ("busy", "a", "b")]
            await until(lambda: ids(node) == ["busy"])
            node.answer("busy", 7)
            await until(lambda: ids(node) == ["busy", "a"])
            assert link.waiting == ["b"]
            link.listen(Listener())
            node.answer("a", finish="stop")  # as with max_tokens of 0
            await until(lambda: ids(node) == ["busy", "a", "b"])
            assert waiting == [[]]
            assert await read(streams[1]) == []

    run(test)


def test_priorities_and_batch_work_are_in_the_front_what_they_are_on_a_device():
    async def test() -> None:
        (node,) = nodes_of(1)
        async with cluster(node, placement="slack-affinity", most_prompts=1) as link:
            for number in range(40):
                link.open([make_request(f"b{number}", batch_due_s=1e9 + number)])
            await until(lambda: len(ids(node)) == 16)
            for id, priority in (("first", 0), ("bulk", 3), ("chat", 0)):
                link.open([make_request(id, priority=priority)])
            await until(lambda: ids(node)[16:] == ["first"])
            for id, after in (("first", ["first", "chat"]), ("chat", ["first", "chat", "bulk"])):
                node.answer(id, 7)
                await until(lambda after=after: ids(node)[16:] == after)  # type: ignore[misc]
            node.answer("bulk", 7)
            node.answer("b0", 7)
            await until(lambda: ids(node)[19:] == ["b16"])
            sent = {each.id: each for each in node.of(AddRequest)}
            assert sent["bulk"].priority == 3 and sent["b16"].batch_due_s == 1e9 + 16

    run(test)


def test_tenants_share_the_front_where_weights_are_given():
    async def test() -> None:
        (node,) = nodes_of(1)
        async with cluster(
            node, placement="slack-affinity", most_prompts=1, weights=TokenWeights()
        ) as link:
            for number in range(4):
                link.open([make_request(f"ann{number}", tenant="ann")])
            for number in range(2):
                link.open([make_request(f"bob{number}", tenant="bob", prompt=[1] * 4)])
            for id in ("ann0", "bob0", "ann1", "bob1", "ann2"):
                await until(lambda id=id: ids(node)[-1:] == [id])  # type: ignore[misc]
                node.answer(id, *([7] * 3 if id == "ann1" else [7]))

    run(test)
