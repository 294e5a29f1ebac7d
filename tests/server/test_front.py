"""A cluster's front is the server that `coserve up` is: what it was started with holds there too."""

import asyncio
from pathlib import Path

import pytest
from cluster_nodes import ScriptedNode, num_ready, until
from httpx import ASGITransport, AsyncClient
from served import adapter_root, model_directory, peft_model

from coserve.cluster.front import Front
from coserve.cluster.nodes import FindNodes
from coserve.errors import CoserveError
from coserve.server.config import ServerConfig


def one_node() -> FindNodes:
    found = {"node-0": ScriptedNode()}

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
        front = Front(config, one_node(), "round-robin")
        app = await front.start()
        try:
            await until(lambda: num_ready(front.link) == 1)
            async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
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
        config = ServerConfig(model=str(model_directory()), home=str(tmp_path), chat_template=template)
        front = Front(config, one_node(), "round-robin")
        await front.start()
        await front.stop()

    with pytest.raises(CoserveError, match="--chat-template"):
        asyncio.run(start(str(tmp_path / "none")))
    asyncio.run(asyncio.wait_for(start(None), 20))


def test_it_shares_out_requests_among_tenants_where_its_engines_do(tmp_path: Path):
    for policy, weight in (("vtc", 3.0), ("slack", 1.0)):
        settings = ("w_p=3",) if policy == "vtc" else ()
        config = ServerConfig(model=str(model_directory()), home=str(tmp_path), policy=policy, policy_settings=settings)
        assert Front(config, one_node(), "slack-affinity").link.view.prompt_weight == weight
