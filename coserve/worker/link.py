"""The server's end of the engine: starts its process, again when it dies, and takes every report to whom it concerns.

One engine at a time, each with a socket of its own in a private directory. What was asked of an engine that dies ends
with `EngineGoneError`: no request and no call waits for an answer that cannot come. Each open request has a queue of
its own, so that a client that reads slowly holds up no other. Text is made here, of the tokens that the engine reports:
its steps wait for no tokenizer.
"""

import asyncio
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq
import zmq.asyncio

import coserve.errors
from coserve.engine.request import Chunk
from coserve.errors import CoserveError, EngineGoneError, ModelError
from coserve.jobs.messages import JobStart
from coserve.jobs.records import AdapterRef
from coserve.worker.protocol import (
    AddRequest,
    CancelJob,
    CancelRequest,
    EngineSettings,
    LoadAdapter,
    PauseJob,
    Ready,
    Refused,
    Reply,
    ResumeJob,
    Shutdown,
    StartFailed,
    StartJob,
    StartProgress,
    StepReport,
    UnloadAdapter,
    decode_report,
    encode,
)
from coserve.worker.streams import RequestStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

# Seconds before an engine that died is started again, doubled each time until one has lived for a while.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _LONG_LIFE_S = 0.2, 30.0, 60.0
# How long checkpoints may take at the end, and the process after them.
_SHUTDOWN_S, _EXIT_S = 60.0, 10.0


class EngineListener(Protocol):
    """Told how the engine is; called on the event loop, and must not block."""

    def engine_ready(self, ready: Ready) -> None:
        """It takes commands: a fresh one, which knows no adapters and no jobs."""

    def engine_gone(self) -> None:
        """It has died."""

    def engine_reported(self, report: StepReport) -> None:
        """What came of steps."""


class EngineLink:
    """The engine, whichever process it is in just now. Implements `coserve.jobs.messages.JobEngine`."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        home: Path | None = None,
        on_progress: Callable[[StartProgress], None] | None = None,
    ) -> None:
        """settings: its address is filled in here. home: where the process keeps what it measures."""
        self._settings, self._home, self._on_progress = settings, home, on_progress
        self._listeners: list[EngineListener] = []
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: Ready | None = None
        self._streams: dict[str, RequestStream] = {}
        self._stopped: set[tuple[str, int]] = set()  # sequences whose end the engine has not reported yet
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._failed: ModelError | None = None
        self._was_ready = False
        self._closing = False
        self.num_restarts = 0

    # -- questions ------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """What the engine said of itself; None while there is none."""
        return self._ready

    @property
    def num_open(self) -> int:
        """Requests that are not over."""
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._process is None else self._process.pid

    def require_ready(self) -> Ready:
        """EngineGoneError if there is no engine to ask now."""
        if self._closing:
            raise EngineGoneError("the server is shutting down; ask another, or later")
        if self._ready is None:
            raise EngineGoneError("the engine is starting; try again in a few seconds")
        return self._ready

    def listen(self, listener: EngineListener) -> None:
        """Tell it what happens, and that the engine is ready if it is already."""
        self._listeners.append(listener)
        if self._ready is not None:
            listener.engine_ready(self._ready)

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until `stop`; ModelError if it cannot start as it was asked."""
        wait_s = _FIRST_WAIT_S
        while not self._closing:
            started_s = time.monotonic()
            await self._live()
            if self._closing:
                return
            if self._failed is not None:
                # What has been started once can be started: perhaps memory of the one before it is not free yet.
                if not self._was_ready:
                    raise self._failed
                _log.error("%s", self._failed)
                self._failed = None
            if time.monotonic() - started_s > _LONG_LIFE_S:
                wait_s = _FIRST_WAIT_S
            _log.error("the engine has died; it is started again in %.1f s", wait_s)
            self.num_restarts += 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def stop(self) -> None:
        """End it, with checkpoints of all jobs; open requests end with an error."""
        self._closing = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._ready is not None:
            with suppress(CoserveError, TimeoutError):
                await asyncio.wait_for(self._call(Shutdown), _SHUTDOWN_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _EXIT_S)
        if process.returncode is None:
            process.kill()
        await process.wait()

    def close_to_requests(self) -> None:
        """Refuse what comes from now on."""
        self._closing = True

    def fail_open_requests(self, reason: str) -> None:
        """End every open request with an error."""
        for stream in list(self._streams.values()):
            self.close(stream)
            stream.fail(EngineGoneError(reason))

    async def _live(self) -> None:
        """One engine, from the start of its process to its end."""
        directory = Path(tempfile.mkdtemp(prefix="coserve-"))
        address = f"ipc://{directory}/engine"
        socket = self._socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)  # sending must never wait
        socket.linger = 0
        receiving: asyncio.Task[None] | None = None
        try:
            socket.bind(address)
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "coserve.worker.process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr,
                env=os.environ | ({} if self._home is None else {"COSERVE_HOME": str(self._home)}),
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(msgspec.structs.replace(self._settings, address=address)) + b"\n")
            receiving = asyncio.create_task(self._receive(socket, process))
            status = await process.wait()
            await self._take_last_words(socket, receiving)
            if not self._was_ready and self._failed is None:
                self._failed = ModelError(f"the engine ended with status {status} before it was ready; see above")
        finally:
            if receiving is not None:
                receiving.cancel()
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            self._gone()
            self._socket = None
            socket.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def _receive(self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process) -> None:
        try:
            while True:
                self._take(decode_report(await socket.recv()))
        except Exception:
            # An engine whose reports are not taken in would leave all requests waiting.
            _log.exception("what the engine said could not be taken in; it is ended")
            if process.returncode is None:
                process.kill()

    async def _take_last_words(self, socket: zmq.asyncio.Socket, receiving: asyncio.Task[None]) -> None:
        """What the process sent before its end may still be on the way to those who wait."""
        while not receiving.done() and await socket.poll(50):
            await asyncio.sleep(0)

    def _gone(self) -> None:
        was_ready, self._ready = self._ready, None
        error = EngineGoneError("the engine died before it was done; it is being started again")
        if self._closing:
            error = EngineGoneError("the server is shutting down")
        streams, self._streams = self._streams, {}
        self._stopped.clear()
        calls, self._calls = self._calls, {}
        for stream in streams.values():
            stream.fail(error)
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
        if was_ready is not None:
            for listener in self._listeners:
                listener.engine_gone()

    # -- reports --------------------------------------------------------------------

    def _take(self, report: Any) -> None:
        if isinstance(report, StepReport):
            self._reported(report)
        elif isinstance(report, Reply):
            self._reply(report)
        elif isinstance(report, Refused):
            if (stream := self._streams.pop(report.id, None)) is not None:
                stream.fail(_error(report.kind, report.error))
        elif isinstance(report, Ready):
            self._ready, self._was_ready = report, True
            for listener in self._listeners:
                listener.engine_ready(report)
        elif isinstance(report, StartFailed):
            self._failed = ModelError(report.error)
        elif self._on_progress is not None:
            self._on_progress(report)

    def _reported(self, report: StepReport) -> None:
        read = [chunk for each in report.chunks if (chunk := self._read(each)) is not None]
        report = msgspec.structs.replace(report, chunks=read)
        # Listeners first: they are to know of a request's end before its client does.
        for listener in self._listeners:
            listener.engine_reported(report)
        for chunk in report.chunks:
            stream = self._streams.get(chunk.request)
            if stream is not None and stream.put(chunk):
                del self._streams[chunk.request]

    def _read(self, chunk: Chunk) -> Chunk | None:
        """A chunk with its text; None for what the engine ran after a stop string."""
        sequence = chunk.request, chunk.index
        if sequence in self._stopped:
            if chunk.finish_reason is not None:
                self._stopped.discard(sequence)
            return None
        stream = self._streams.get(chunk.request)
        if stream is None:
            return chunk
        found, stop = stream.read(chunk)
        if stop is not None:
            self._stopped.add(sequence)
            self._send(stop)
        return found

    def _reply(self, reply: Reply) -> None:
        call = self._calls.pop(reply.call, None)
        if call is None or call.done():
            return
        if reply.error is None:
            call.set_result(None)
        else:
            call.set_exception(_error(reply.kind or "", reply.error))

    # -- requests -------------------------------------------------------------------

    def open(self, requests: list[AddRequest], tokenizer: "PreTrainedTokenizerBase | None" = None) -> RequestStream:
        """Send requests to the engine; to be closed in any case. tokenizer: for their text; only this thread uses it.

        Raises:
            EngineGoneError: there is no engine now. RequestError: stop strings without a tokenizer.
        """
        self.require_ready()
        stream = RequestStream(requests, tokenizer)
        for request in stream.for_engine():
            self._streams[request.id] = stream
            self._send(request)
        return stream

    def close(self, stream: RequestStream) -> None:
        """Its chunks are no longer wanted: what has not ended is cancelled."""
        for request in stream.requests:
            if self._streams.pop(request.id, None) is not None:
                self._send(CancelRequest(request.id))

    # -- adapters and jobs ------------------------------------------------------------

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Have it on the device."""
        self.require_ready()
        await self._call(LoadAdapter, adapter)

    async def unload_adapter(self, name: str) -> None:
        """No new request finds it."""
        self.require_ready()
        await self._call(UnloadAdapter, name)

    async def start_job(self, job: JobStart) -> None:
        """See `JobEngine`."""
        await self._call(StartJob, job)

    async def pause_job(self, job: str) -> None:
        """See `JobEngine`."""
        await self._call(PauseJob, job)

    async def resume_job(self, job: str) -> None:
        """See `JobEngine`."""
        await self._call(ResumeJob, job)

    async def cancel_job(self, job: str) -> None:
        """See `JobEngine`."""
        await self._call(CancelJob, job)

    async def _call(self, kind: Callable[..., Any], *fields: Any) -> None:
        """Send a command, and wait for its reply."""
        if self._ready is None:
            raise EngineGoneError("the engine is starting; try again in a few seconds")
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(kind(number, *fields))
            await call
        finally:
            self._calls.pop(number, None)

    def _send(self, command: Any) -> None:
        assert self._socket is not None
        # Without a limit to what may wait in the socket, sending never blocks; its future is done at once.
        sent = asyncio.ensure_future(self._socket.send(encode(command), zmq.NOBLOCK))
        # An engine that has just died takes nothing more: until its death is known here, `_gone` is still to come, and
        # tells those who wait.
        with suppress(zmq.Again):
            sent.result()


def _error(kind: str, message: str) -> CoserveError:
    """An error of the engine's process, in this one."""
    made = getattr(coserve.errors, kind, CoserveError)
    return made(message) if isinstance(made, type) and issubclass(made, CoserveError) else CoserveError(message)
