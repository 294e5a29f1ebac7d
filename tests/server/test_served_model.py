"""Announcements of what a Ray cluster serves: they are true when a front has ended, or could not
begin. Without a cluster.
"""

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coserve.cli.main import app
from coserve.cluster.front.choice import ANSWERS
from coserve.errors import ClusterError
from coserve.server.config import ServerConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'"
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def test_a_front_that_cannot_start_says_why_though_ray_is_gone(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import RpcError

    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray import front as ray_front

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("there is no memory left")

    def gone(_: Any) -> None:
        raise RpcError("failed to connect to all addresses")

    monkeypatch.setattr(ray_front, "serve", SimpleNamespace(start=lambda **_: None, run=fail))
    monkeypatch.setattr(ray_front, "application", lambda *_, **__: None)
    monkeypatch.setattr(ray_commands, "announce_served", gone)
    with pytest.raises(ClusterError, match="the front cannot start: there is no memory left"):
        ray_front.deploy(ServerConfig(), "round-robin", resources={})


@pytest.mark.parametrize("answers", [True, False])
def test_the_front_that_answers_takes_its_word_back_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, answers: bool
):
    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray import front as ray_front

    told = list[str | None]()

    class Standby:
        def __init__(self, front: Any) -> None:
            self.front, self.stats = front, {ANSWERS: answers}

        async def begin(self, *, others: bool) -> None: ...

        async def stop(self) -> None: ...

    monkeypatch.setattr(ray_front, "StandbyFront", Standby)
    monkeypatch.setattr(ray_front, "Front", lambda *_, **__: None)
    for module in (ray_commands, ray_front):
        monkeypatch.setattr(
            module, "announce_served", lambda served: told.append(served and served.model)
        )

    async def test() -> None:
        front: Any = SimpleNamespace()  # one that is not ended again when the test is over
        await ray_front.FrontApplication.__init__(
            front, ServerConfig(model="tiny"), "round-robin", 2
        )
        await ray_front.FrontApplication.__del__(front)

    asyncio.run(test())
    assert told == (["tiny", None] if answers else ["tiny"])


def test_a_front_can_be_started_where_one_is_gone_that_could_not_take_its_word_back(
    monkeypatch: pytest.MonkeyPatch,
):
    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray import front as ray_front
    from coserve.cluster.ray import machine as ray_machine

    def deploy(*_: Any, **__: Any) -> None:
        raise ClusterError("it begins")

    def nothing(*_: Any) -> None:
        pass

    kept = dict[bytes, bytes]()
    claims = SimpleNamespace(
        keys=lambda prefix: list(kept),
        get=kept.get,
        put=kept.__setitem__,
        add=lambda key, value: not kept.update({key: value}),
    )
    monkeypatch.setattr(ray_machine, "ClusterKeys", lambda _: claims)
    monkeypatch.setattr(ray_machine, "served_at", lambda address: ray_machine.Served(model="gone"))
    monkeypatch.setattr(ray_machine, "check_address", nothing)
    for name in ("connect", "disconnect", "undeploy"):
        monkeypatch.setattr(ray_commands, name, nothing)
    monkeypatch.setattr(ray_front, "check_http", nothing)
    monkeypatch.setattr(ray_commands, "served_models", list[str])
    monkeypatch.setattr(ray_commands, "this_machine", dict[str, float])
    monkeypatch.setattr(ray_front, "deploy", deploy)
    arguments = [
        "cluster",
        "up",
        "tiny",
        "--address",
        "192.0.2.7:6379",
        "--dtype",
        "bfloat16",
        "--nodes",
    ]
    assert str(CliRunner().invoke(app, [*arguments, "0"]).exception) == "it begins"
    assert "already serves gone" in str(CliRunner().invoke(app, [*arguments, "1"]).exception)


@pytest.mark.parametrize("module", ["commands", "router"])
def test_commands_that_ask_a_cluster_and_its_http_servers_start_without_torch(module: str):
    code = (
        f"import sys, coserve.cluster.ray.{module}; "
        "print(sorted({'torch', 'transformers', 'sqlalchemy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
