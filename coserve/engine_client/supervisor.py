"""The engine's process as the server sees it: started, watched, started again when it dies or
stands still, ended.

One process at a time, each with a socket of its own in a private directory. What a process sends
goes to the owner; when it is gone, the owner is told why.
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

# Seconds before an engine that died is started again, doubled each time until one was ready. A
# ready one may be killed as often as somebody likes: those who ask wait no longer for the next, and
# jobs that kill engines are set aside.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0
# How often the engine is asked whether its step loop comes round.
_PING_S = 1.0


class EngineOwner(Protocol):
    """Told what the engine says; called on the event loop, and must not block."""

    def engine_said(self, report: Any) -> None:
        """A report, in the order in which they were sent."""

    def engine_lost(self, reason: str) -> None:
        """There is none now; what was asked of it will not be answered."""


class Supervisor:
    """Keeps an engine running."""

    def __init__(
        self,
        settings: EngineSettings,
        owner: EngineOwner,
        launch: Launch,
        *,
        home: Path | None = None,
        timeout_s: float = inf,
    ) -> None:
        """settings: its address is filled in here. launch: starts the process. home: where that
        keeps what it measures. timeout_s: an engine that was ready and says nothing for this long
        is ended.
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
        """The jobs that the last engine may have died of; None if that is not known."""

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until `close`; ModelError if it cannot start as it was asked: then
        it may be called again.
        """
        self._failed, wait_s = None, _FIRST_WAIT_S
        while not self._closing:
            was_ready = await self._live()
            if self._closing:
                return
            if self._failed is not None:
                # What has been started once can be started: perhaps memory of the one before it is
                # not free yet.
                if not self._was_ready:
                    raise self._failed
                _log.error("%s", self._failed)
                self._failed = None
            if was_ready:
                wait_s = _FIRST_WAIT_S
            _log.error("%s; it is started again in %.1f s", self._reason, wait_s)
            self.num_restarts += 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def close(self) -> None:
        """Start no other engine when this one ends."""
        self._closing = True

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called: `run` would return at once."""
        return self._closing

    async def end(self, wait_s: float) -> None:
        """Wait for the process to end, and kill it after that time."""
        process = self._process
        if process is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), wait_s)
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """End the process at once, also one that is stopped."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def send(self, command: Any) -> None:
        """To the process, or to nobody: until its death is known here, `engine_lost` is still to
        come.
        """
        if self._socket is None:
            return
        # Without a limit to what may wait in the socket, sending never blocks; its future is done
        # at once.
        sent = asyncio.ensure_future(self._socket.send(encode(command), zmq.NOBLOCK))
        with suppress(zmq.Again):
            sent.result()

    async def _live(self) -> bool:
        """One engine, from the start of its process to its end. Whether it was ready."""
        try:
            directory = make_socket_directory(home_directory(self._home))
        except OSError as error:  # the disk is full, say
            self._failed = ModelError(f"the engine cannot be started: {error}")
            return False
        activity = self._activity = LastActivity(activity_file(directory))
        self._hangs = False
        self.jobs_at_death = ()
        context = zmq.asyncio.Context()
        socket = self._socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)  # sending must never wait
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
            await self._take_last_words(socket, receiving)
            if not self._was_ready and self._failed is None:
                self._failed = ModelError(
                    f"the engine ended with status {status} before it was ready; see above"
                )
            return self._is_ready
        finally:
            for task in tasks:
                task.cancel()
            self.kill()
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
                self._owner.engine_said(report)
        except Exception:
            # An engine whose reports are not taken in would leave all requests waiting.
            _log.exception("what the engine said could not be taken in; it is ended")
            self.kill()

    async def _watch(self) -> None:
        """Ask whether the step loop comes round, and end a process in which it does not; but not
        one that is shutting down, which writes checkpoints instead, and for which `end` has a
        limit.

        Its silence is counted by rounds here: a server that was itself stopped has heard nothing
        either.
        """
        while True:
            await asyncio.sleep(_PING_S)
            if not self._is_ready:
                continue
            self.send(Ping())
            self.silent_s += _PING_S
            if self.silent_s > self._timeout_s and not self._closing:
                self._reason = (
                    f"the engine has not answered for {self._timeout_s:g} s and was ended"
                )
                self._hangs = self._activity is not None and not self._activity.is_stopped()
                self.kill()
                return

    async def _take_last_words(
        self, socket: zmq.asyncio.Socket, receiving: "asyncio.Task[None]"
    ) -> None:
        """What the process sent before its end may still be on the way to those who wait."""
        while not receiving.done() and await socket.poll(50):
            await asyncio.sleep(0)
