"""Several fronts: one answers, and another takes over when it is gone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import ScriptedNode, make_job, make_request, num_ready, until
from httpx import ASGITransport, AsyncClient
from msgspec.structs import replace
from served import model_directory

from coserve.cluster.front.choice import choose_front
from coserve.cluster.front.front import Front, node_settings
from coserve.cluster.front.lost_front import http_middlewares
from coserve.cluster.front.standby import StandbyFront
from coserve.cluster.nodes.messages import settings_digest
from coserve.engine.commands import AddRequest, PauseJob
from coserve.errors import EngineGoneError, StoreError
from coserve.server.config import ServerConfig


def make_front(home: Path, node: ScriptedNode | None = None, **settings: Any) -> StandbyFront:
    node = node or ScriptedNode()

    async def find() -> dict[str, ScriptedNode]:
        return {"node-0": node}

    config = ServerConfig(model=str(model_directory()), home=str(home), **settings)
    node.ready = replace(node.ready, model=config.model)
    node.settings = settings_digest(node_settings(config))
    return StandbyFront(Front(config, find, "round-robin"))


async def status_of(front: StandbyFront) -> int:
    transport = ASGITransport(front)
    async with AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.get("/v1/models")).status_code


def test_requests_go_to_the_one_that_answers_and_wait_while_nobody_does():
    assert choose_front({"a": {"answers": False}, "b": {"answers": True}, "c": {}}) == ["b"]
    assert choose_front({"a": {"answers": False}, "b": {}}) == []
    assert choose_front({"a": {}}) == ["a"], "it is the only one, and answers once it has started"
    assert choose_front({"a": {"answers": False}}) == [], (
        "the other has just died, and it has not taken over yet"
    )


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_whose_front_dies_is_told_so_unless_it_has_begun_to_answer(has_begun: bool):
    async def dies(
        scope: Any, receive: Any, send: Any
    ) -> None:  # as Ray Serve's proxy has it: it says nothing more
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"what came", "more_body": False})

    async def test() -> None:
        (middleware,) = http_middlewares()
        app = middleware.cls(dies, *middleware.args, **middleware.kwargs)
        async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
            answer = await client.get("/v1/models")
        if has_begun:
            assert (answer.status_code, answer.text) == (200, "what came")
        else:
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["message"].startswith(
                "The front that had this request was lost: ask again"
            )

    asyncio.run(test())


def test_another_front_takes_over_when_one_is_gone(tmp_path: Path):
    async def test() -> None:
        first, second = make_front(tmp_path), make_front(tmp_path)
        await first.begin(others=True)
        await until(lambda: first.stats["answers"])
        await second.begin(others=True)
        assert await status_of(first) == 200
        assert not second.stats["answers"] and await status_of(second) == 503
        await first.stop()
        await until(lambda: second.stats["answers"])
        assert await status_of(second) == 200
        second.check()
        third = make_front(tmp_path)
        await third.begin(others=True)
        await third.stop()
        await second.stop()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_fronts_end_when_requests_are_over_with_checkpoints_of_jobs_and_none_takes_over(
    tmp_path: Path,
):
    async def test() -> None:
        node = ScriptedNode()
        first, second = make_front(tmp_path, node), make_front(tmp_path)
        await first.begin(others=True)
        link = first.front.link
        await until(lambda: num_ready(link) == 1)
        await second.begin(others=True)
        await link.start_job(make_job("one"))
        stream = link.open([make_request("a")])
        await until(lambda: node.of(AddRequest))
        ending = asyncio.gather(first.end(60.0), second.end(60.0))
        await asyncio.sleep(0)  # both have been asked
        assert [await status_of(each) for each in (first, second)] == [503, 503]
        assert not ending.done()
        node.answer("a", 7, finish="stop")
        assert [chunk.tokens async for batch in stream.batches() for chunk in batch] == [(7,)]
        await ending
        assert [each.id for each in node.of(PauseJob)] == ["one"]
        assert not second.stats["answers"]
        for front in (first, second):
            front.check()
            await front.stop()  # as Ray Serve asks for, too

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_front_that_is_told_twice_to_end_waits_for_requests_as_long_as_it_was_told_last(
    tmp_path: Path,
):
    async def test() -> None:
        node = ScriptedNode()
        front = make_front(tmp_path, node)
        await front.begin(others=False)
        link = front.front.link
        await until(lambda: num_ready(link) == 1)
        await link.start_job(make_job("one"))
        stream = link.open([make_request("a")])
        await until(lambda: node.of(AddRequest))
        ending = asyncio.create_task(front.end(3600.0))
        await asyncio.sleep(0.05)
        await front.end(0.0)
        await ending
        assert node.of(PauseJob)
        with pytest.raises(EngineGoneError, match="the server is shutting down"):
            await anext(stream.batches())

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_front_that_has_the_home_and_cannot_answer_is_not_well(tmp_path: Path):
    async def test() -> None:
        front = make_front(tmp_path, database=f"sqlite:///{tmp_path}/nowhere/jobs.db")
        await front.begin(others=True)
        with pytest.raises(StoreError, match="cannot be opened"):
            await until(front.check)
        assert not front.stats["answers"]
        await front.stop()

    asyncio.run(asyncio.wait_for(test(), 60))
