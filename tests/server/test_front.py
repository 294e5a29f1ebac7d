"""A cluster's front is the server that `coserve up` is: what it was started with holds there
too."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest
from cluster_nodes import READY, ScriptedNode, num_ready, until
from httpx import ASGITransport, AsyncClient
from msgspec.structs import replace
from served import adapter_root, model_directory, peft_model

from coserve.cluster.front.front import Front, node_settings
from coserve.cluster.nodes.messages import settings_digest
from coserve.cluster.nodes.registry import FindNodes
from coserve.cluster.nodes.shared_paths import SharedPaths, unseen
from coserve.errors import CoserveError
from coserve.server.config import ServerConfig


def one_node(config: ServerConfig) -> FindNodes:
    """Return a node with this front's settings."""
    settings = node_settings(config)
    ready = replace(READY, model=config.model)
    found = {"node-0": ScriptedNode(ready, settings=settings_digest(settings))}

    async def find() -> dict[str, ScriptedNode]:
        return found

    return find


def test_it_has_the_template_and_the_adapters_that_it_was_started_with(tmp_path: Path):
    peft_model("pirate")
    config = ServerConfig(
        model=str(model_directory()),
        home=str(tmp_path),
        chat_template="{% for message in messages %}!{{ message.content }}{% endfor %}",
        lora_modules=(f"mine={adapter_root() / 'pirate'}",),
    )

    async def test() -> None:
        front = Front(config, one_node(config), "round-robin")
        app = await front.start()
        try:
            await until(lambda: num_ready(front.link) == 1)
            async with AsyncClient(
                transport=ASGITransport(app), base_url="http://127.0.0.1"
            ) as client:
                chat = {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
                told = (await client.post("/tokenize", json=chat)).json()
                assert "".join(told["token_strs"]) == "!x"
                models = (await client.get("/v1/models")).json()["data"]
                assert "mine" in {each["id"] for each in models}
        finally:
            await front.stop()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_what_it_cannot_read_is_said_and_the_home_is_free_again(tmp_path: Path):
    async def start(template: str | None) -> None:
        config = ServerConfig(
            model=str(model_directory()), home=str(tmp_path), chat_template=template
        )
        front = Front(config, one_node(config), "round-robin")
        await front.start()
        await front.stop()

    with pytest.raises(CoserveError, match="--chat-template"):
        asyncio.run(start(str(tmp_path / "none")))
    asyncio.run(asyncio.wait_for(start(None), 20))


def test_nodes_of_another_model_are_none_of_this_front_even_if_all_are(tmp_path: Path):
    config = ServerConfig(model=str(model_directory()), home=str(tmp_path / "home"))
    other = ServerConfig(
        model="tiny", home=str(tmp_path / "home")
    )  # as the front before was started

    async def test() -> None:
        front = Front(config, one_node(other), "round-robin")
        await front.start()
        try:
            (found,) = await until(
                lambda: [each for each in front.link.describe() if each["refused"]]
            )
            assert found["refused"].startswith(
                "it was started with other settings than this front gives"
            )
            assert num_ready(front.link) == 0
        finally:
            await front.stop()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_other_weights_by_the_same_path_are_other_settings(tmp_path: Path):
    directory = tmp_path / "model"
    shutil.copytree(model_directory(), directory)
    config = ServerConfig(model=str(directory), home=str(tmp_path / "home"))
    before = node_settings(config)
    assert before.model_files and settings_digest(before) == settings_digest(node_settings(config))
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert settings_digest(node_settings(config)) != settings_digest(before)
    elsewhere = dataclasses.replace(config, model="dummy:qwen2.5-0.5b")
    assert node_settings(elsewhere).model_files == ""


def test_a_node_must_see_the_home_and_the_adapters_that_the_front_sees(tmp_path: Path):
    peft_model("pirate")
    config = ServerConfig(
        model=str(model_directory()),
        home=str(tmp_path),
        lora_modules=(f"mine={adapter_root() / 'pirate'}",),
    )

    async def test() -> None:
        looked = list[SharedPaths]()

        class Looking(ScriptedNode):
            async def compare_files(self, shared: SharedPaths) -> str | None:
                looked.append(shared)
                return unseen(shared)

        ready = replace(READY, model=config.model)
        node = Looking(ready, settings=settings_digest(node_settings(config)))

        async def find() -> dict[str, ScriptedNode]:
            return {"node-0": node}

        front = Front(config, find, "round-robin")
        await front.start()
        try:
            await until(lambda: num_ready(front.link) == 1)
        finally:
            await front.stop()
        home, adapter = looked[-1].files
        assert home.what == f"--home {tmp_path}"
        assert adapter.what == f"the adapter mine in {adapter_root() / 'pirate'}"
        assert looked[-1].home == str(tmp_path)
        why = unseen(looked[-1])  # as where that is not mounted: the front's file is gone with it
        assert why is not None
        assert why.startswith(
            f"it does not see --home {tmp_path} as the front does ({home.paths[0]}: No such file"
        )
        assert why.endswith("mount it on every machine by the same path, or give --files-url")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_it_shares_out_requests_among_tenants_where_its_engines_do(tmp_path: Path):
    for policy, weight in (("vtc", 3.0), ("slack", 1.0)):
        settings = ("w_p=3",) if policy == "vtc" else ()
        config = ServerConfig(
            model=str(model_directory()),
            home=str(tmp_path),
            policy=policy,
            policy_settings=settings,
        )
        assert Front(config, one_node(config), "slack-affinity").link.view.prompt_weight == weight
