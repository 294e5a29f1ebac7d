"""Link of a server to its engine: it sends commands to the engine's process, and passes every
report to those whom it concerns.

Whatever is under way in an engine that dies ends with `EngineGoneError`: no request and no call
waits for an answer that cannot come. Each open request has a queue of its own, so that a client
that reads slowly delays no other. Text is made here, of the tokens that the engine reports: its
steps wait for no tokenizer.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from coserve.engine.commands import (
    AdapterRef,
    AddRequest,
    CancelJob,
    CancelRequest,
    CombineJob,
    JobStart,
    LoadAdapter,
    PauseJob,
    ResumeJob,
    StartJob,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.request import Chunk
from coserve.engine_client.launch import Launch, program
from coserve.engine_client.streams import RequestStream
from coserve.engine_client.supervisor import EngineOwner, Supervisor
from coserve.errors import CoserveError, EngineGoneError, error_of_kind
from coserve.protocol.messages import (
    CallReply,
    EngineSettings,
    Ready,
    RequestRefused,
    Shutdown,
    StartProgress,
    StepReport,
)
from coserve.tuning.shard import Combination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Longest times for checkpoints at the end, and for the process to exit after them: together less
# than the 30 s that supervisors of services commonly allow.
_SHUTDOWN_S, _EXIT_S = 20.0, 5.0
# Silence after which an engine counts as hung: it gets no shutdown command and is not alive.
_SILENT_S = 5.0


class EngineListener(Protocol):
    """A listener to the engine, called on the event loop; must not block."""

    def engine_ready(self, ready: Ready) -> None:
        """Handle a fresh engine that accepts commands, and has no adapters and no jobs."""

    def engine_gone(self) -> None:
        """Handle the engine's death."""

    def engine_reported(self, report: StepReport) -> None:
        """Handle a report about steps."""


class EngineHost(Protocol):
    """The place where an engine runs: a process here (`Supervisor`), or another machine."""

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last message."""
        ...

    @property
    def jobs_at_death(self) -> tuple[str, ...] | None:
        """The jobs that may have killed the last engine; None if that is not known."""
        ...

    def send(self, command: Any) -> None:
        """Send a command to the engine. Until its death is known here, the command may be lost;
        then `engine_lost` follows.
        """

    async def run(self) -> None:
        """Keep an engine running until `close`.

        Raises:
            ModelError: It cannot start with these settings.
        """

    def close(self) -> None:
        """Start no other engine when this one ends."""

    async def end(self, wait_s: float) -> None:
        """Wait for the engine to end, and kill it after `wait_s`."""


def engine_here(
    settings: EngineSettings,
    *,
    launch: Launch | None = None,
    home: Path | None = None,
    timeout_s: float = inf,
) -> Callable[[EngineOwner], EngineHost]:
    """Return a host that runs an engine in a process of this machine.

    Args:
        settings: See `Supervisor`.
        launch: Starts the process (default: as a program).
        home: See `Supervisor`.
        timeout_s: See `Supervisor`.
    """
    return lambda owner: Supervisor(
        settings, owner, launch or program(), home=home, timeout_s=timeout_s
    )


# Receives the id and the stream of a request whose engine is gone, and the reason.
OnLost = Callable[[str, RequestStream, EngineGoneError], None]


class EngineLink:
    """The link to the engine, whichever process it is in now. Implements
    `coserve.engine_client.access.EngineAccess`.
    """

    def __init__(
        self,
        host: Callable[[EngineOwner], EngineHost],
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        on_lost: OnLost = lambda request, stream, error: stream.fail(error),
    ) -> None:
        """Connect with a host.

        Args:
            host: Makes the host, see `engine_here`.
            on_progress: Receives the stages of a starting engine.
            on_lost: Receives each request whose engine has died (default: its stream ends with the
                error).
        """
        self._on_progress, self._on_lost = on_progress, on_lost
        self._host = host(self)
        self._listeners: list[EngineListener] = []
        self._ready: Ready | None = None
        self.start_progress: StartProgress | None = None
        """Stage of a starting engine; None before its first report and once it is ready."""
        self._streams: dict[str, RequestStream] = {}
        # Sequences that ended with a stop string, whose end the engine has not reported yet.
        self._stopped: set[tuple[str, int]] = set()
        self._calls: dict[int, asyncio.Future[None]] = {}
        # Random, since an engine may still answer another server's calls.
        self._numbers = itertools.count(secrets.randbits(62))
        self._closing = False
        self._has_vocabulary = False  # whether the engine has the text of its tokens

    # -- questions ------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """Report of the engine that is ready; None while there is none."""
        return self._ready

    @property
    def num_open(self) -> int:
        """Number of requests that are not over."""
        return len(self._streams)

    def require_ready(self) -> Ready:
        """Return the report of the engine that is ready.

        Raises:
            EngineGoneError: There is no engine now.
        """
        if self._closing:
            raise EngineGoneError("the server is shutting down; ask another, or later")
        if self._ready is None:
            doing = "" if self.start_progress is None else f" ({self.start_progress})"
            raise EngineGoneError(f"the engine is starting{doing}; try again in a few seconds")
        return self._ready

    @property
    def jobs_at_death(self) -> tuple[str, ...] | None:
        """The jobs that may have killed the last engine; None if that is not known."""
        return self._host.jobs_at_death

    @property
    def jobs_lost(self) -> None:
        """The jobs of the last engine that died; None: all, since there is no other engine."""
        return None

    @property
    def num_nodes(self) -> int:
        """One: this engine trains whole jobs."""
        return 1

    @property
    def is_silent(self) -> bool:
        """Return whether the step loop has not answered for a while."""
        return self._host.silent_s > _SILENT_S

    def require_alive(self) -> None:
        """Check that the engine is ready and its step loop answers.

        Raises:
            EngineGoneError: There is no engine now, or it hangs.
        """
        self.require_ready()
        if self.is_silent:
            raise EngineGoneError(f"the engine has not answered for {self._host.silent_s:.0f} s")

    def listen(self, listener: EngineListener) -> None:
        """Notify a listener of what happens, and at once of an engine that is ready."""
        self._listeners.append(listener)
        if self._ready is not None:
            listener.engine_ready(self._ready)

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until `stop`.

        Raises:
            ModelError: It cannot start with these settings.
        """
        await self._host.run()

    async def stop(self) -> None:
        """Stop the engine, with checkpoints of all jobs if it still answers; open requests end with
        an error.
        """
        self._closing = True
        self._host.close()
        if self._ready is not None and not self.is_silent:
            with suppress(CoserveError, TimeoutError):
                # The reply follows the last checkpoint.
                await asyncio.wait_for(self._call(Shutdown), _SHUTDOWN_S)
                await self._host.end(_EXIT_S)
        await self._host.end(0.0)

    def close_to_requests(self) -> None:
        """Refuse all further requests; an engine that dies is not restarted."""
        self._closing = True
        self._host.close()

    def fail_open_requests(self, reason: str) -> None:
        """End every open request with an error."""
        for stream in list(self._streams.values()):
            self.close(stream)
            stream.fail(EngineGoneError(reason))

    # -- reports --------------------------------------------------------------------

    def engine_lost(self, reason: str) -> None:
        """End all open requests and calls with an error, and notify listeners (`EngineOwner`)."""
        was_ready, self._ready = self._ready, None
        self.start_progress = None
        error = EngineGoneError(f"{reason} before it was done; it is being started again")
        if self._closing:
            error = EngineGoneError("the server is shutting down")
        # Replaced before callbacks run: these may send requests to the next engine.
        streams, self._streams = self._streams, {}
        self._stopped.clear()
        calls, self._calls = self._calls, {}
        for request, stream in streams.items():
            self._on_lost(request, stream, error)
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
        if was_ready is not None:
            for listener in self._listeners:
                listener.engine_gone()

    def take_report(self, report: Any) -> None:
        """Pass a report to those whom it concerns; see `EngineOwner`."""
        if isinstance(report, StepReport):
            self._reported(report)
        elif isinstance(report, CallReply):
            self._reply(report)
        elif isinstance(report, RequestRefused):
            if (stream := self._streams.pop(report.id, None)) is not None:
                stream.fail(_error(report.kind, report.error))
        elif isinstance(report, Ready):
            # A fresh engine has no vocabulary.
            self._ready, self._has_vocabulary, self.start_progress = report, False, None
            for listener in self._listeners:
                listener.engine_ready(report)
        elif isinstance(report, StartProgress):
            self.start_progress = report
            if self._on_progress is not None:
                self._on_progress(report)

    def _reported(self, report: StepReport) -> None:
        with_text = [self._read(chunk) for chunk in report.chunks]
        chunks = [chunk for chunk in with_text if chunk is not None]
        report = msgspec.structs.replace(report, chunks=chunks)
        if report.stats is not None and self._ready is not None:
            self._ready = msgspec.structs.replace(self._ready, slo=report.stats.slo)
        # Listeners first: they learn of a request's end before its client.
        for listener in self._listeners:
            listener.engine_reported(report)
        for chunk in report.chunks:
            stream = self._streams.get(chunk.request)
            if stream is not None and stream.put(chunk):
                del self._streams[chunk.request]

    def _read(self, chunk: Chunk) -> Chunk | None:
        """Return a chunk with its text; None for what the engine ran after a stop string."""
        sequence = chunk.request, chunk.index
        # The engine ran ahead before the stop command reached it.
        if sequence in self._stopped:
            if chunk.finish_reason is not None:
                self._stopped.discard(sequence)
            return None
        stream = self._streams.get(chunk.request)
        if stream is None:
            return chunk
        shown, stop = stream.read(chunk)
        if stop is not None:
            self._stopped.add(sequence)
            self._host.send(stop)
        return shown

    def _reply(self, reply: CallReply) -> None:
        call = self._calls.pop(reply.call, None)
        if call is None or call.done():
            return
        if reply.error is None:
            call.set_result(None)
        else:
            call.set_exception(_error(reply.kind or "", reply.error))

    # -- requests -------------------------------------------------------------------

    def open(
        self,
        requests: list[AddRequest],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        shown_tokens: tuple[str, ...] = (),
    ) -> RequestStream:
        """Send requests to the engine.

        Args:
            requests: Requests that belong together.
            tokenizer: Makes text of their tokens; only this thread uses it.
            shown_tokens: See `TextStream`.

        Returns:
            Their stream, which must be closed in any case.

        Raises:
            EngineGoneError: There is no engine now.
            RequestError: There are stop strings and no tokenizer.
        """
        self.require_ready()
        stream = RequestStream(requests, tokenizer, shown_tokens)
        for request in stream.for_engine():
            self.send(request, stream)
        return stream

    def send(self, request: AddRequest, stream: RequestStream) -> None:
        """Send one request of a stream, in the form that the engine needs; its chunks go to the
        stream.
        """
        self._streams[request.id] = stream
        self._host.send(request)

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """Send the engine the text of its tokens, unless it has that; must come before requests
        with grammars.

        Raises:
            EngineGoneError: There is no engine now.
        """
        self.require_ready()
        if not self._has_vocabulary:
            self._has_vocabulary = True
            self._host.send(UseVocabulary(list(pieces), list(special)))

    def close(self, stream: RequestStream) -> None:
        """Close a stream; its unfinished requests are cancelled."""
        for request in stream.requests:
            self.cancel(request.id)

    def cancel(self, request: str) -> None:
        """Cancel one request, unless it has ended."""
        if self._streams.pop(request, None) is not None:
            self._host.send(CancelRequest(request))

    # -- adapters and jobs ------------------------------------------------------------

    async def load_adapter(self, adapter: AdapterRef, changed_by: str = "") -> None:
        """Load an adapter onto the device.

        Args:
            adapter: Adapter to load.
            changed_by: Job that has changed the served model itself instead of making an adapter: a
                fresh engine serves that model from now on.
        """
        self.require_ready()
        await self._call(LoadAdapter, adapter, changed_by)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; no new request finds it."""
        self.require_ready()
        await self._call(UnloadAdapter, name)

    async def start_job(self, job: JobStart) -> None:
        """Start a job; see `JobEngine`."""
        await self._call(StartJob, job)

    async def pause_job(self, job: str) -> None:
        """Pause a job; see `JobEngine`."""
        await self._call(PauseJob, job)

    async def resume_job(self, job: str) -> None:
        """Resume a job; see `JobEngine`."""
        await self._call(ResumeJob, job)

    async def cancel_job(self, job: str, *, keeps: bool = True) -> None:
        """Cancel a job; see `JobEngine`.

        Args:
            job: Id of the job.
            keeps: Whether a checkpoint is written.
        """
        await self._call(CancelJob, job, keeps)

    async def combine(self, job: str, combination: Combination) -> None:
        """Have one node's part of a job combine the contributions of its nodes; errors as in
        `JobEngine`.
        """
        await self._call(CombineJob, job, combination)

    async def _call(self, kind: Callable[..., Any], *fields: Any) -> None:
        """Send a command, and wait for its reply."""
        if self._ready is None:
            raise EngineGoneError("the engine is starting; try again in a few seconds")
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._host.send(kind(number, *fields))
            await call
        finally:
            self._calls.pop(number, None)


def _error(kind: str, message: str) -> CoserveError:
    """Return the error that the engine's process has reported."""
    return (error_of_kind(kind) or CoserveError)(message)
