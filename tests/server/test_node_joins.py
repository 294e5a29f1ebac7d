"""Joins of nodes: a front uses those with its settings that are alike, see the same files, and have
what the others have.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import READY, ScriptedNode, cluster, make_request, num_ready, until
from msgspec.structs import replace

from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.nodes.messages import NodeSettings, settings_digest
from coserve.engine.commands import AdapterRef, AddRequest, LoadAdapter, UnloadAdapter
from coserve.engine.config import EngineConfig
from coserve.errors import AdapterError, ClusterError
from coserve.protocol.messages import EngineSettings

PIRATE = AdapterRef(name="someone/pirate#1", directory="/adapters/pirate")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


def make_settings(*, model: str = "tiny", dtype: str = "auto", **given: Any) -> NodeSettings:
    engine = EngineSettings(
        address="", model=model, dtype=dtype, device="cpu", engine=EngineConfig(**given)
    )
    return NodeSettings(engine=engine, timeout_s=60.0, home="/nowhere", model_files="")


def checks_of(home: Path) -> tuple[str, NodeChecks]:
    """Return the digest of the settings of a front's nodes, and the checks of that front."""
    settings = replace(make_settings(), home=str(home))
    checks = NodeChecks(settings)
    checks.begin()
    return settings_digest(settings), checks


def problems(link: Any) -> list[str]:
    return [each["refused"] for each in link.describe() if each["refused"]]


async def until_refused(link: Any) -> str:
    (found,) = await until(lambda: problems(link))
    return str(found)


# -- what they are ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (make_settings(model="/models/b"), "its model is tiny, and that of this front /models/b"),
        (make_settings(dtype="bfloat16"), "its dtype is float32, and that of this front bfloat16"),
    ],
)
def test_a_node_that_is_not_what_the_front_is_for_is_not_used_even_if_all_are_alike(
    settings: NodeSettings, why: str
):
    async def test() -> None:
        nodes = [ScriptedNode(settings=settings_digest(settings)) for _ in range(2)]
        async with cluster(*nodes, ready=0, checks=NodeChecks(settings)) as link:
            await until(lambda: len(problems(link)) == 2)
            assert all(each.startswith(why) for each in problems(link))

    run(test)


def test_a_node_of_another_front_is_made_anew_and_used_then():
    async def test() -> None:
        settings = make_settings()
        other, own = (
            ScriptedNode(settings="others", error="no such model"),
            ScriptedNode(settings=settings_digest(settings)),
        )
        renewed = list[str]()

        async def renew(name: str) -> None:
            renewed.append(name)
            other.settings, other.error = settings_digest(settings), None

        async with cluster(other, own, checks=NodeChecks(settings, renew)):
            assert renewed == ["node-0"]

    run(test)


def test_a_node_is_made_anew_once():
    async def test() -> None:
        node, renewed = ScriptedNode(settings="others"), list[str]()

        async def renew(name: str) -> None:
            renewed.append(name)

        async with cluster(node, ready=0, checks=NodeChecks(make_settings(), renew)) as link:
            assert (await until_refused(link)).startswith(
                "it was started with other settings than this front gives"
            )
            assert renewed == ["node-0"] and node.session is None

    run(test)


def test_a_node_that_cannot_be_made_anew_is_tried_again():
    async def test() -> None:
        node, settings = ScriptedNode(settings="others"), make_settings()

        async def renew(name: str) -> None:
            if node.settings == "others":
                node.settings = "still others"
                raise ClusterError("Ray does not make it anew: it is busy")
            node.settings = settings_digest(settings)

        async with cluster(node, checks=NodeChecks(settings, renew)) as link:
            assert not problems(link)

    run(test)


def test_settings_are_the_same_for_who_gives_and_who_has_got_them():
    assert settings_digest(make_settings(ttft_s=2)) == settings_digest(make_settings(ttft_s=2.0))
    assert settings_digest(make_settings(ttft_s=2)) != settings_digest(make_settings(ttft_s=3))


def test_nodes_of_a_kind_with_other_weights_are_not_used_together():
    async def test() -> None:
        first, second = (ScriptedNode(replace(READY, fingerprint=each)) for each in "ab")
        other_kind = ScriptedNode(
            replace(READY, fingerprint="c", device="cuda:0")
        )  # where they may be rounded otherwise
        async with cluster(first, second, other_kind, ready=2) as link:
            assert "its model tiny has other weights than that of others" in await until_refused(
                link
            )

    run(test)


def test_a_node_that_was_unlike_others_is_used_when_they_are_gone():
    async def test() -> None:
        first, second = ScriptedNode(), ScriptedNode(replace(READY, dtype="bfloat16"))
        third = ScriptedNode(replace(READY, dtype="bfloat16"))
        async with cluster(first, second, third, ready=1) as link:
            await until(lambda: len(problems(link)) == 2)
            first.die()
            await until(lambda: num_ready(link) == 2)
            first.live()
            assert (await until_refused(link)).startswith(
                "its dtype is float32, and that of others bfloat16"
            )

    run(test)


def test_of_unlike_nodes_that_come_at_once_one_is_used(tmp_path: Path):
    async def test() -> None:
        settings, checks = checks_of(tmp_path)
        nodes = [
            ScriptedNode(replace(READY, dtype=each), settings=settings)
            for each in ("float32", "bfloat16")
        ]
        async with cluster(*nodes, ready=1, checks=checks) as link:
            assert "and that of others" in await until_refused(link)
            assert num_ready(link) == 1

    run(test)


# -- what they see and have --------------------------------------------------------------------


def test_a_node_that_does_not_see_what_the_front_sees_is_not_used_until_it_does(tmp_path: Path):
    async def test() -> None:
        settings, checks = checks_of(tmp_path)
        nodes = [ScriptedNode(settings=settings) for _ in range(2)]
        nodes[1].unseen = "it does not see --home"
        async with cluster(*nodes, ready=1, checks=checks) as link:
            assert await until_refused(link) == "it does not see --home"
            assert nodes[1].session is None
            nodes[1].unseen = None
            await until(lambda: num_ready(link) == 2)
            nodes[
                1
            ].unseen = "it does not see --home"  # Ray has started it again on another machine
            nodes[1].lose_engine()
            assert await until_refused(link) == "it does not see --home"
            for number in range(3):
                link.open([make_request(str(number))])
            await until(lambda: len(nodes[0].of(AddRequest)) == 3)
            nodes[1].unseen = None
            await until(lambda: num_ready(link) == 2)
        checks.end()
        assert not list(tmp_path.iterdir())

    run(test)


def test_a_newcomer_has_the_adapters_that_are_loaded_before_it_is_used():
    async def test() -> None:
        first, second = ScriptedNode(), ScriptedNode()
        second.is_alive = False
        async with cluster(first, second, ready=1) as link:
            other = AdapterRef(name="someone/other#2", directory="/adapters/other")
            await link.load_adapter(PIRATE)
            await link.load_adapter(other)
            await link.unload_adapter(other.name)
            second.live()
            await until(lambda: num_ready(link) == 2)
            assert [each.adapter for each in second.of(LoadAdapter)] == [PIRATE]

    run(test)


def test_a_newcomer_that_cannot_read_a_loaded_adapter_is_not_used_and_says_which():
    async def test() -> None:
        first, second = ScriptedNode(), ScriptedNode()
        second.is_alive = False
        second.answers = lambda command: (
            "it is missing" if isinstance(command, LoadAdapter) else None
        )
        async with cluster(first, second, ready=1) as link:
            await link.load_adapter(PIRATE)
            second.live()
            assert await until_refused(link) == (
                "it cannot have the adapter someone/pirate in /adapters/pirate, which the others "
                "have: it is missing; "
                "every node must be able to read it"
            )
            await link.unload_adapter(PIRATE.name)
            await until(lambda: num_ready(link) == 2)

    run(test)


def test_an_adapter_that_no_node_has_any_more_keeps_no_node_out(caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        node = ScriptedNode()
        async with cluster(node) as link:
            await link.load_adapter(PIRATE)
            node.answers = lambda command: (
                "it is missing" if isinstance(command, LoadAdapter) else None
            )
            node.lose_engine()
            await until(lambda: len(node.of(LoadAdapter)) == 2)
            await until(lambda: num_ready(link) == 1)
            assert "no node has the adapter someone/pirate in /adapters/pirate" in caplog.text

    run(test)


def test_a_newcomer_lets_go_of_what_is_unloaded_meanwhile():
    async def test() -> None:
        first, second = ScriptedNode(), ScriptedNode()
        second.is_alive = False
        async with cluster(first, second, ready=1) as link:
            await link.load_adapter(PIRATE)
            unloading = list[Any]()

            def before_reply(command: Any) -> None:
                if isinstance(command, LoadAdapter):
                    unloading.append(asyncio.ensure_future(link.unload_adapter(PIRATE.name)))

            second.before_reply = before_reply
            second.live()
            await until(lambda: num_ready(link) == 2)
            assert [type(each) for each in second.commands[:2]] == [LoadAdapter, UnloadAdapter]
            await asyncio.gather(*unloading)

    run(test)


def test_an_adapter_that_could_not_be_loaded_is_asked_of_no_newcomer():
    async def test() -> None:
        first, second = ScriptedNode(), ScriptedNode()
        second.is_alive = False
        first.answers = lambda command: (
            "it is missing" if isinstance(command, LoadAdapter) else None
        )
        async with cluster(first, second, ready=1) as link:
            with pytest.raises(AdapterError, match="it is missing"):
                await link.load_adapter(PIRATE)
            second.live()
            await until(lambda: num_ready(link) == 2)
            assert not second.of(LoadAdapter)

    run(test)


# -- what they say -----------------------------------------------------------------------------


def test_a_node_whose_reports_cannot_be_taken_in_is_lost_and_used_again(
    caplog: pytest.LogCaptureFixture,
):
    async def test() -> None:
        nodes = ScriptedNode(), ScriptedNode()
        async with cluster(*nodes) as link:
            session = nodes[0].session
            stream = link.open([make_request("a")])
            await until(lambda: nodes[0].of(AddRequest))
            nodes[0].say_encoded(b"\xc1 is no report")
            await until(lambda: nodes[0].session not in (None, session))
            await until(lambda: num_ready(link) == 2)
            await until(lambda: nodes[1].of(AddRequest))
            nodes[1].answer("a", 7, finish="stop")
            assert [
                token
                async for batch in stream.batches()
                for chunk in batch
                for token in chunk.tokens
            ] == [7]

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "what the node node-0 said could not be taken in; it is lost" in caplog.text
    assert "Traceback" in caplog.text
