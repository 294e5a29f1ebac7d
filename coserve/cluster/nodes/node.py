"""A node: one engine in a process of its own, kept running, for whichever front is attached.

One front at a time: the newest session. A session begins with a fresh engine, so that nothing of an
earlier front's requests, for which nobody waits any more, can be mistaken for this one's. Jobs lose
no more by that than by the death of an engine: they resume from their checkpoints. The node's
memory of a session is gone when its process dies; the front notices, and begins another session.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from coserve.cluster.nodes.messages import (
    CommandBatch,
    NodeEngineLost,
    NodeReports,
    NodeSettings,
    NodeStatus,
    settings_digest,
)
from coserve.cluster.nodes.paths import NodePaths
from coserve.cluster.nodes.shared_paths import SharedPaths, unseen
from coserve.engine.commands import AddRequest
from coserve.engine_client.fork_server import ForkServer
from coserve.engine_client.launch import Launch, program
from coserve.engine_client.shared_forks import connect
from coserve.engine_client.supervisor import Supervisor
from coserve.errors import CoserveError, EngineGoneError, ModelError
from coserve.home import home_directory, make_private
from coserve.protocol.messages import Ping, Pong, Ready, decode_command, encode
from coserve.protocol.run_directory import clear_socket_directories
from coserve.server.lifecycle.home_lock import lock_home
from coserve.version import VERSION

_log = logging.getLogger(__name__)

# Reports of one step follow one another closely: they travel together.
_GATHER_S = 0.005
# A front that has not called for this long is gone: its jobs train for nobody.
_FRONT_SILENT_S = 60.0
# Wait before an engine that could not start is tried again, doubled each time: what it lacks, such
# as a disk that is not mounted yet, may come, and Ray does not restart an actor that lives.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 2.0, 60.0
_WATCH_S = 5.0
# Nodes of one machine.
_MAX_NODES = 256


class NodeServer:
    """Server of one node's calls. Belongs to one event loop; implements `NodeCalls`, and owns a
    `Supervisor`.
    """

    def __init__(self, settings: NodeSettings, *, launch: Launch | None = None) -> None:
        """Prepare a node.

        Args:
            settings: Settings of the node and of its engine.
            launch: Starts engines (default: by a process that has imported everything, so that an
                engine is back soon when another has died; where that is not possible, as a
                program).
        """
        self._settings = settings_digest(settings)
        self._lock = ExitStack()
        home = self._lock.enter_context(_a_home())
        # With a URL for files, front and node have homes of their own; else both see the same disk.
        self._paths = (
            NodePaths(Path(settings.home), home) if settings.engine.files_url is not None else None
        )
        self._supervisor = Supervisor(
            settings.engine,
            self,
            launch or self._launch(settings.engine.model),
            home=home,
            timeout_s=settings.timeout_s,
        )
        self._running: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._failure: str | None = None
        self._is_fresh = True  # the engine that lives now has got no commands
        self._session: str | None = None
        self._num_sent = 0
        self._heard_s = 0.0
        self._outbox: dict[int, bytes] = {}
        self._last = self._lost = (
            0  # numbers of the newest report, and of the newest death of an engine
        )
        self._news = asyncio.Event()

    def _launch(self, model: str) -> Launch:
        if sys.platform != "linux":
            return program()
        forks = ForkServer(None, model, connect=connect)
        self._lock.callback(forks.close)
        return forks.launch

    # -- life -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine if it has not been started; to be called on the event loop."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._watching = asyncio.create_task(self._watch())

    async def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._supervisor.is_closed:
            try:
                await self._supervisor.run()
            except ModelError as error:
                self._failure = str(error)
                _log.error("the engine cannot start: %s; it is tried again in %g s", error, wait_s)
            except Exception as error:
                self._failure = f"the engine cannot be kept running: {error!r}"
                _log.exception(
                    "the engine cannot be kept running; it is tried again in %g s", wait_s
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _watch(self) -> None:
        """Detach a front that is gone."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._session is not None and time.monotonic() - self._heard_s > _FRONT_SILENT_S:
                _log.warning(
                    "the front has not asked for %g s: what it wanted is dropped", _FRONT_SILENT_S
                )
                await self.detach(self._session)

    async def stop(self) -> None:
        """End the engine; callers that still wait get EngineGoneError."""
        if self._watching is not None:
            self._watching.cancel()
        self._begin(None)
        self._supervisor.close()
        await self._supervisor.end(0.0)
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        self._lock.close()

    # -- calls of a front ---------------------------------------------------------------

    async def describe(self) -> NodeStatus:
        self.start()
        ready = self._ready
        return NodeStatus(
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="failed"
            if self._failure is not None
            else "starting"
            if ready is None
            else "ready",
            settings=self._settings,
            error=self._failure,
            device=None if ready is None else ready.device,
            model=None if ready is None else ready.model,
            dtype=None if ready is None else ready.dtype,
            num_restarts=self._supervisor.num_restarts,
        )

    async def compare_files(self, shared: SharedPaths) -> str | None:
        return await asyncio.to_thread(unseen, shared)

    async def attach(self, session: str) -> None:
        self.start()
        self._begin(session)
        if not self._is_fresh:
            self._supervisor.kill()
        elif self._ready is not None:
            self._put(self._ready)

    async def send(self, session: str, batch: CommandBatch) -> None:
        self._check(session)
        # The batch has been delivered before.
        if batch.number <= self._num_sent:
            return
        if batch.number != self._num_sent + 1:
            raise EngineGoneError(
                f"commands {self._num_sent + 1} to {batch.number - 1} have not come: attach again"
            )
        self._num_sent = batch.number
        # The front sent it to an engine whose death it had not seen yet.
        if batch.seen < self._lost:
            return
        # The offset between the two machines' clocks, and the time under way.
        delay_s = time.monotonic() - batch.now_s
        for each in batch.commands:
            command = decode_command(each)
            if isinstance(command, AddRequest):
                command = command.by_clock(delay_s)
            # A ping leaves nothing behind: the next front can have this engine as it is.
            self._is_fresh &= isinstance(command, Ping)
            self._supervisor.send(command if self._paths is None else self._paths.here(command))

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        self._check(session)
        # `after` acknowledges what the front has taken in.
        for number in [number for number in self._outbox if number <= after]:
            del self._outbox[number]
        if not self._outbox:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
                await asyncio.sleep(_GATHER_S)
            self._check(session)
        return NodeReports(
            reports=list(self._outbox.values()),
            last=self._last,
            now_s=time.monotonic(),
            silent_s=self._supervisor.silent_s,
        )

    async def detach(self, session: str) -> None:
        self._check(session)
        self._begin(None)
        if not self._is_fresh:
            self._supervisor.kill()

    def _begin(self, session: str | None) -> None:
        self._session, self._num_sent, self._heard_s = session, 0, time.monotonic()
        self._outbox.clear()
        self._last = self._lost = 0
        self._news.set()  # wakes callers that wait for reports of an earlier session

    def _check(self, session: str) -> None:
        if session != self._session:
            raise EngineGoneError("the node has begun anew, or another front is attached")
        self._heard_s = time.monotonic()

    # -- reports of the engine (see `EngineOwner`) ----------------------------------------

    def take_report(self, report: Any) -> None:
        if isinstance(report, Ready):
            self._ready = report
            self._is_fresh = True
            self._failure = None
        # A front learns from `silent_s` that the engine lives.
        if not isinstance(report, Pong):
            self._put(report if self._paths is None else self._paths.there(report))

    def engine_lost(self, reason: str) -> None:
        self._is_fresh = True
        if self._ready is not None:
            self._ready = None
            self._put(NodeEngineLost(reason, self._supervisor.jobs_at_death))
            self._lost = self._last

    def _put(self, report: Any) -> None:
        if self._session is None:
            return
        self._last += 1
        self._outbox[self._last] = encode(report)
        self._news.set()


@contextmanager
def _a_home() -> Iterator[Path]:
    """Lock a directory that no other node of this machine uses now, for what an engine leaves in
    its home. Measurements of the machine are in the usual home, for all.
    """
    base = home_directory() / "nodes"
    make_private(base)
    with ExitStack() as lock:
        for number in count():
            directory = base / str(number)
            with suppress(CoserveError):
                lock.enter_context(lock_home(directory))
                break
            if number >= _MAX_NODES:
                raise CoserveError(
                    f"{base} has {number} homes of nodes, and none can be used: see that it can be "
                    f"written"
                )
        clear_socket_directories(directory)
        make_private(directory)
        yield directory
