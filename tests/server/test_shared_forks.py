"""A process of a machine that forks engines for all nodes there, and outlives them."""

import asyncio
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from coserve.engine_client.fork_server import ForkServer
from coserve.engine_client.shared_forks import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are forked on Linux alone")

# What an engine ends with that cannot read what it is to be.
NO_SETTINGS = b"these are no settings\n"


class Connected:
    """Whose process each connection has come to."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    async def connect(self, model: str) -> socket.socket | None:
        found = await connect(model)
        assert found is not None
        pid, _, _ = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.pids.append(pid)
        return found


# All that the tests came to, to be ended with them.
PIDS = set[int]()


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Of nodes, for which one process is enough in these tests; its path is short, as a socket's
    must be."""
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSERVE_HOME", directory)
        yield Path(directory)
        for pid in PIDS:
            end(pid)


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(test: Callable[[Connected, ExitStack], Awaitable[None]]) -> Connected:
    connected = Connected()

    async def whole() -> None:
        with ExitStack() as opened:
            await test(connected, opened)

    try:
        asyncio.run(asyncio.wait_for(whole(), 120))
    finally:
        PIDS.update(connected.pids)
    return connected


def node(connected: Connected, opened: ExitStack) -> ForkServer:
    """What forks a node's engines."""
    made = ForkServer(None, "tiny", connect=connected.connect)
    opened.callback(made.close)
    return made


def test_nodes_share_one_also_those_that_come_when_others_have_gone(
    home: Path, capfd: pytest.CaptureFixture[str]
):
    async def test(connected: Connected, opened: ExitStack) -> None:
        first, second = node(connected, opened), node(connected, opened)
        engines = await asyncio.gather(
            *(each.launch(NO_SETTINGS, home) for each in (first, second))
        )
        assert [await each.wait() for each in engines] == [1, 1]
        first.close()
        second.close()
        third = await node(connected, opened).launch(NO_SETTINGS, home)
        assert await third.wait() == 1

    connected = run(test)
    assert len(connected.pids) == 3 and len({*connected.pids}) == 1
    assert connected.pids[0] != os.getpid()
    assert capfd.readouterr().err.count("JSON is malformed") == 3, (
        "engines write where their nodes do"
    )


def test_an_engine_of_one_node_ends_with_that_and_those_of_others_do_not(home: Path):
    async def test(connected: Connected, opened: ExitStack) -> None:
        first, second = node(connected, opened), node(connected, opened)
        # Without the end of a line, engines wait for the rest of it.
        engines = [await each.launch(b"{", home) for each in (first, second)]
        engines[0].kill()
        assert await engines[0].wait() == -signal.SIGKILL
        assert engines[1].returncode is None
        again = await first.launch(NO_SETTINGS, home)
        assert await again.wait() == 1
        engines[1].kill()
        assert await engines[1].wait() == -signal.SIGKILL

    assert len({*run(test).pids}) == 1


def test_nodes_that_would_import_otherwise_have_another_one_and_all_else_may_differ(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    async def test(connected: Connected, opened: ExitStack) -> None:
        for name, value in (
            ("RAY_JOB_ID", "1"),
            ("CUDA_VISIBLE_DEVICES", "1"),
            ("OMP_NUM_THREADS", "3"),
        ):
            (await connected.connect("tiny")).close()
            monkeypatch.setenv(name, value)
        (await connected.connect("tiny")).close()
        end(connected.pids[-1])  # before it has imported anything

    first, second, third, other = run(test).pids
    assert first == second == third != other


def test_one_that_is_killed_leaves_nodes_what_they_have_and_another_comes(home: Path):
    async def test(connected: Connected, opened: ExitStack) -> None:
        forks = node(connected, opened)
        await (await forks.launch(NO_SETTINGS, home)).wait()
        end(connected.pids[0])
        while connected.pids[-1] == connected.pids[0]:  # it takes a moment to die
            (await connected.connect("tiny")).close()
        assert await (await forks.launch(NO_SETTINGS, home)).wait() == 1

    assert len({*run(test).pids}) == 2


def test_there_is_none_where_the_path_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path / ("long" * 30)))
    assert asyncio.run(connect("tiny")) is None
