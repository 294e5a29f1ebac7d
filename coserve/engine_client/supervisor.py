"""Supervisor of the engine's process: it starts the process, watches it, restarts it when it dies
or hangs, and ends it.

There is one process at a time, each with a socket of its own in a private directory. Its reports go
to the owner; when it is gone, the owner learns the reason.
"""

import asyncio
import logging
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from coserve.engine_client.last_activity import LastActivity
from coserve.engine_client.launch import Launch, Launched
from coserve.errors import ModelError
from coserve.home import home_directory
from coserve.protocol.messages import (
    EngineSettings,
    Ping,
    Ready,
    StartFailed,
    decode_report,
    encode,
)
from coserve.protocol.run_directory import (
    activity_file,
    make_socket_directory,
    remove_socket_directory,
    socket_address,
)

_log = logging.getLogger(__name__)

# Seconds before a dead engine is restarted, doubled each time until one was ready. Deaths of
# engines that were ready do not add up: clients wait for the next one, and jobs that kill engines
# are isolated.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0
# Interval of pings to the step loop.
_PING_S = 1.0


class EngineOwner(Protocol):
    """Owner of an engine, called on the event loop; must not block."""

    def take_report(self, report: Any) -> None:
        """Handle a report; reports come in the order in which they were sent."""

    def engine_lost(self, reason: str) -> None:
        """Handle the engine's death; open requests and calls will not be answered."""


class Supervisor:
    """Supervisor that keeps an engine running."""

    def __init__(
        self,
        settings: EngineSettings,
        owner: EngineOwner,
        launch: Launch,
        *,
        home: Path | None = None,
        timeout_s: float = inf,
    ) -> None:
        """Set what is started and who owns it.

        Args:
            settings: Settings of the engine; the address is filled in here.
            owner: Receives reports and the news of a death.
            launch: Starts the process.
            home: Home in which the process keeps its measurements.
            timeout_s: Seconds without a message after which an engine that was ready is killed.
        """
        self._settings, self._owner, self._launch = settings, owner, launch
        self._home, self._timeout_s = home, timeout_s
        self._socket: zmq.asyncio.Socket | None = None
        self._process: Launched | None = None
        self._failed: ModelError | None = None
        self._is_ready = self._was_ready = self._closing = False
        self._reason = ""
        self._activity: LastActivity | None = None
        self._hangs = False
        self.num_restarts = 0
        self.silent_s = 0.0
        self.jobs_at_death: tuple[str, ...] | None = ()
        """The jobs that may have killed the last engine; None if that is not known."""

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until `close`; may be called again after an error.

        Raises:
            ModelError: The engine cannot start with these settings.
        """
        self._failed, wait_s = None, _FIRST_WAIT_S
        while not self._closing:
            was_ready = await self._live()
            if self._closing:
                return
            if self._failed is not None:
                # An engine that started once can start again: perhaps memory of the dead one is not
                # free yet.
                if not self._was_ready:
                    raise self._failed
                _log.error("%s", self._failed)
                self._failed = None
            if was_ready:
                wait_s = _FIRST_WAIT_S
            _log.error("%s; restarting it in %.1f s", self._reason, wait_s)
            self.num_restarts += 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def close(self) -> None:
        """Start no other engine when this one ends."""
        self._closing = True

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called, so that `run` would return at once."""
        return self._closing

    async def end(self, wait_s: float) -> None:
        """Wait for the process to end, and kill it after `wait_s`."""
        process = self._process
        if process is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), wait_s)
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """Kill the process, also one that is stopped."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def send(self, command: Any) -> None:
        """Send a command to the process. Until its death is known here, the command may be lost;
        then `engine_lost` follows.
        """
        if self._socket is None:
            return
        # The socket's queue has no limit, so sending never blocks, and its future is done at once.
        sent = asyncio.ensure_future(self._socket.send(encode(command), zmq.NOBLOCK))
        with suppress(zmq.Again):
            sent.result()

    async def _live(self) -> bool:
        """Run one engine, from the start of its process to its end; return whether it was ready."""
        try:
            directory = make_socket_directory(home_directory(self._home))
        except OSError as error:  # such as a full disk
            self._failed = ModelError(f"the engine cannot be started: {error}")
            return False
        activity = self._activity = LastActivity(activity_file(directory))
        self._hangs = False
        self.jobs_at_death = ()
        context = zmq.asyncio.Context()
        socket = self._socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)  # sending must never wait
        # A dead process reads nothing more, so that closing does not wait for it.
        socket.linger = 0
        tasks: list[asyncio.Task[None]] = []
        try:
            address = socket_address(directory)
            socket.bind(address)
            path = None if activity.path is None else str(activity.path)
            settings = msgspec.structs.replace(self._settings, address=address, activity=path)
            process = self._process = await self._launch(
                msgspec.json.encode(settings) + b"\n", self._home
            )
            self._reason = "the engine died"
            receiving = asyncio.create_task(self._receive(socket))
            tasks += [receiving, asyncio.create_task(self._watch())]
            status = await process.wait()
            self.jobs_at_death = activity.jobs_at_death(status, hung=self._hangs)
            # The loss is reported in `finally`, after everything that the engine could still say.
            await self._receive_last_reports(socket, receiving)
            if not self._was_ready and self._failed is None:
                self._failed = ModelError(
                    f"the engine ended with status {status} before it was ready; see above"
                )
            return self._is_ready
        finally:
            for task in tasks:
                task.cancel()
            self.kill()
            # Before `engine_lost`, in whose callbacks a dead engine must not look alive.
            self._is_ready, self.silent_s = False, 0.0
            self._owner.engine_lost(self._reason)
            self._socket = None
            context.destroy(linger=0)
            remove_socket_directory(directory)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                report = decode_report(await socket.recv())
                self.silent_s = 0.0
                if isinstance(report, Ready):
                    self._is_ready = self._was_ready = True
                elif isinstance(report, StartFailed):
                    self._failed = ModelError(report.error)
                self._owner.take_report(report)
        except Exception:
            # An engine whose reports are not handled would leave all requests waiting.
            _log.exception("a report of the engine could not be handled; the engine is killed")
            self.kill()

    async def _watch(self) -> None:
        """Ping the step loop, and kill a process in which it does not answer.

        A process that is shutting down is spared: it writes checkpoints, and `end` has a limit for
        it. Its silence is counted in rounds of this loop: a server that was itself stopped has
        received nothing either.
        """
        while True:
            await asyncio.sleep(_PING_S)
            if not self._is_ready:
                continue
            self.send(Ping())
            # Any report sets it back to 0.
            self.silent_s += _PING_S
            if self.silent_s > self._timeout_s and not self._closing:
                self._reason = (
                    f"the engine has not answered for {self._timeout_s:g} s and was ended"
                )
                self._hangs = self._activity is not None and not self._activity.is_stopped()
                self.kill()
                return

    async def _receive_last_reports(
        self, socket: zmq.asyncio.Socket, receiving: "asyncio.Task[None]"
    ) -> None:
        """Receive reports that the process sent before its end and that are still on the way."""
        while not receiving.done() and await socket.poll(50):
            await asyncio.sleep(0)
