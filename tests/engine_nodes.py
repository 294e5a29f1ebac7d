"""A cluster of real engines in threads of this process, without Ray: nodes that train, answer, and
die when told to."""

import asyncio
import errno
import os
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from cluster_nodes import READY, ScriptedNode, num_ready, until
from engines import make_engine, watched, word_tokenizer
from job_engine import World, world
from msgspec.structs import replace

from coserve.cluster.front.link import ClusterLink
from coserve.cluster.nodes.messages import CommandBatch
from coserve.cluster.nodes.paths import NodePaths
from coserve.cluster.placement import make_placement
from coserve.cluster.scheduler import ClusterScheduler
from coserve.devices.messages.commands import Command
from coserve.devices.messages.jobs import WriteCheckpoint
from coserve.engine.commands import AddRequest
from coserve.engine.engine import Engine
from coserve.jobs.files.remote_files import RemoteFiles, shared_files
from coserve.protocol.messages import decode_command, decode_report, encode
from coserve.worker.process import EngineProcess


class _KilledError(BaseException):
    """The engine's thread ends wherever it asks for a command."""


class _Socket:
    """A socket from which an `EngineProcess` reads commands, and to which it sends reports."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.is_killed = False
        self.send = send
        self._next: bytes | None = None

    def poll(self, wait_ms: int) -> bool:
        if self._next is None:
            with suppress(queue.Empty):
                self._next = (
                    self.commands.get(timeout=wait_ms / 1000)
                    if wait_ms
                    else self.commands.get_nowait()
                )
        if self.is_killed:
            raise _KilledError
        return self._next is not None

    def recv(self) -> bytes:
        found, self._next = self._next, None
        assert found is not None
        return found


class Away:
    """A machine that shares no disk with the front's, but a URL."""

    def __init__(self, front: Path, home: Path, url: str) -> None:
        self.home, self.paths = home, NodePaths(front, home)
        self.shared = RemoteFiles(url, home, most_bytes=10**9)


class EngineNode(ScriptedNode):
    """Implements `NodeCalls`: each session has a fresh engine, in a thread of its own. has_room: on
    its disk."""

    def __init__(self, make: Callable[[], Engine], away: "Away | None" = None) -> None:
        """away: from the front's disk (None: it is here, too)."""
        super().__init__()
        self._make, self._away = make, away
        self.engine: Engine | None = None
        self.has_room = True
        self.failures: list[str] = []
        """Of engines whose threads ended with an error: nobody hears of them any more."""
        self._socket: _Socket | None = None
        self._threads: list[threading.Thread] = []

    async def attach(self, session: str) -> None:
        self._check()
        self.kill_engine()
        self.engine = engine = self._make()
        watched(engine).refuse = self._refuse_to_write
        self.ready = replace(READY, num_pages=engine.device.info.num_pages)
        loop = asyncio.get_running_loop()

        def send(report: bytes) -> None:
            if not socket.is_killed:
                loop.call_soon_threadsafe(self._say, session, report)

        socket = self._socket = _Socket(send)
        await super().attach(session)
        thread = threading.Thread(target=self._run, args=(engine, socket), daemon=True)
        self._threads.append(thread)
        thread.start()

    async def send(self, session: str, batch: CommandBatch) -> None:
        self._check(session)
        assert self._socket is not None
        for each in batch.commands:
            command = decode_command(each)
            self.commands.append(command)
            self._socket.commands.put(
                each if self._away is None else encode(self._away.paths.here(command))
            )

    def _refuse_to_write(self, command: Command) -> None:
        if not self.has_room and isinstance(command, WriteCheckpoint):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _say(self, session: str, report: bytes) -> None:
        if session == self.session:
            self.say_encoded(
                report
                if self._away is None
                else encode(self._away.paths.there(decode_report(report)))
            )

    def kill_engine(self) -> None:
        """Kill the engine, with its unsent reports and its unread commands."""
        self.commands.clear()
        if self._socket is not None:
            self._socket.is_killed = True
            self._socket.commands.put(b"")

    def die(self) -> None:
        self.kill_engine()
        super().die()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, engine: Engine, socket: _Socket) -> None:
        shared = None if self._away is None else self._away.shared
        try:
            with suppress(_KilledError):
                # The socket is as much of one as the process uses.
                EngineProcess(engine, socket, shared=shared).run()  # type: ignore[arg-type]
        except Exception:
            self.failures.append(traceback.format_exc())
            raise


def small_engine() -> Engine:
    return make_engine(tokenizer=word_tokenizer())


class ClusterWorld:
    """A server's jobs on such nodes."""

    def __init__(self, made: World, link: ClusterLink, nodes: dict[str, EngineNode]) -> None:
        self.world, self.link, self.nodes = made, link, nodes

    def node(self, number: int) -> EngineNode:
        return self.nodes[f"node-{number}"]

    def working(self, job: str) -> list[str]:
        """Nodes that have a part of a job."""
        return [each["name"] for each in self.link.describe() if job in each["jobs"]]

    def asked(self, request: str) -> str | None:
        """The node that a request was sent to; None if its engine has died since."""
        return next(
            (
                name
                for name, node in self.nodes.items()
                if request in {r.id for r in node.of(AddRequest)}
            ),
            None,
        )

    def num_ready(self) -> int:
        return num_ready(self.link)

    async def until(self, question: Callable[[], Any]) -> Any:
        return await self.world.until(question)


class _Listener:
    def __init__(self, made: World, link: ClusterLink) -> None:
        self._manager, self._link = made.manager, link

    def engine_ready(self, ready: Any) -> None:
        self._manager.engine_ready()

    def engine_gone(self) -> None:
        self._manager.engine_gone(self._link.jobs_at_death, self._link.jobs_lost)

    def engine_reported(self, report: Any) -> None:
        self._manager.engine_reported(report.job_events, report.checkpoints)


@asynccontextmanager
async def cluster_world(
    home: Path,
    num_nodes: int = 3,
    make: Callable[[], Engine] = small_engine,
    url: str | None = None,
) -> AsyncIterator[ClusterWorld]:
    """All nodes are ready. url: nodes have homes of their own, beside `home`, and nothing in common
    but this."""
    away = [
        None if url is None else Away(home, home.with_name(f"of-node-{each}"), url)
        for each in range(num_nodes)
    ]
    nodes = {f"node-{number}": EngineNode(make, each) for number, each in enumerate(away)}
    shared = shared_files(url, home)

    async def find() -> dict[str, EngineNode]:
        return nodes

    async with world(home, alive=False, manager={"shared": shared}) as made:
        link = ClusterLink(find, ClusterScheduler(make_placement("round-robin")), shared=shared)
        found = ClusterWorld(made, link, nodes)
        running = asyncio.create_task(link.run())
        try:
            await until(lambda: found.num_ready() == num_nodes)
            made.link.engine = link
            link.listen(_Listener(made, link))
            made.manager.engine_ready()
            yield found
        finally:
            made.link.engine = None
            await link.stop()
            await running
            for node in nodes.values():
                node.kill_engine()
                node.join()
