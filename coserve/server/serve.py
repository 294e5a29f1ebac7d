"""The server's life: it listens at once, starts the engine, serves, and on a signal ends in good order.

In good order: new requests are refused, open streams may continue for a while, then the engine writes checkpoints
of its jobs and ends, and nothing of it remains. A second signal ends the waiting.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from coserve.errors import CoserveError
from coserve.server.app import create_app
from coserve.server.config import ServerConfig
from coserve.server.context import ServerContext
from coserve.server.home_lock import lock_home
from coserve.server.job_service import start_jobs, stop_jobs
from coserve.server.prompts import Prompts
from coserve.worker.link import EngineLink
from coserve.worker.protocol import EngineSettings, Ready, StartProgress, StepReport

_log = logging.getLogger(__name__)

# For answers that are whole, but not sent yet.
_LAST_ANSWERS_S = 5
# Longer than clients keep an idle connection (httpx: 5 s): one that is closed just as it is used again loses a request.
_KEEP_ALIVE_S = 75
_POLL_S = 0.05


class Watcher(Protocol):
    """Shows the start and the end to a user."""

    def progress(self, progress: StartProgress) -> None:
        """How far it is."""
        ...

    def ready(self, ready: Ready, context: ServerContext, url: str) -> None:
        """Requests are answered from now on (told once)."""
        ...

    def stopping(self, num_open: int, drain_s: float) -> None:
        """A signal has come (told once): num_open requests are waited for, drain_s seconds at most."""
        ...


class _Server(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; CoserveError if that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CoserveError(f"cannot listen at {host}:{port}: {reason}; choose another --port or --host") from None
    return listening


async def serve(config: ServerConfig, watcher: Watcher) -> None:
    """Serve until a signal comes.

    Raises:
        ModelError: the engine cannot start as it was asked. CoserveError: the port or the home cannot be had.
    """
    with lock_home(config.directory):
        await _serve_at_home(config, watcher)


async def _serve_at_home(config: ServerConfig, watcher: Watcher) -> None:
    listening = listen(config.host, config.port)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    settings = EngineSettings(
        address="",
        model=config.model,
        dtype=config.dtype,
        weights=config.weights,
        device=config.device,
        threads=config.threads,
        record=None if config.record is None else str(Path(config.record).absolute()),
        engine=config.engine,
    )
    context = ServerContext(
        config=config,
        link=EngineLink(settings, home=config.directory, on_progress=watcher.progress),
        prompts=Prompts(config.model),
    )
    first = _FirstReady()
    context.link.listen(first)
    server = _Server(
        uvicorn.Config(
            create_app(context),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            lifespan="off",
        )
    )
    try:
        with _signals() as signalled:
            await _serve(
                server, listening, context, signalled, watcher, lambda: _announce(context, first, watcher, url)
            )
    finally:
        listening.close()
        context.prompts.close()


async def _serve(
    server: uvicorn.Server,
    listening: socket.socket,
    context: ServerContext,
    signalled: "_Signals",
    watcher: Watcher,
    announce: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    engine = asyncio.create_task(context.link.run())
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    starting = asyncio.create_task(announce())
    waiting = asyncio.create_task(signalled.first.wait())
    try:
        ends: set[asyncio.Task[Any]] = {engine, serving, waiting}
        await asyncio.wait({*ends, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if signalled.first.is_set():
            watcher.stopping(context.link.num_open, context.config.drain_s)
            await _drain(context, signalled)
    finally:
        await context.link.stop()
        server.should_exit = True
        waiting.cancel()
        starting.cancel()
        await asyncio.gather(serving, waiting, starting, return_exceptions=True)
        if not engine.done():
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        await stop_jobs(context)
    if not engine.cancelled():
        engine.result()


async def _announce(context: ServerContext, first: "_FirstReady", watcher: Watcher, url: str) -> None:
    """Load what this process needs of the model; tell when all is there."""
    await context.prompts.load()
    await start_jobs(context)
    watcher.ready(await first.ready, context, url)


async def _drain(context: ServerContext, signalled: "_Signals") -> None:
    """Let streams come to their ends, for a while."""
    context.link.close_to_requests()
    until_s = asyncio.get_running_loop().time() + context.config.drain_s
    while context.link.num_open and asyncio.get_running_loop().time() < until_s and not signalled.second.is_set():
        await asyncio.sleep(_POLL_S)
    context.link.fail_open_requests("the server is shutting down")


class _FirstReady:
    """Waits for the first engine."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def engine_ready(self, ready: Ready) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)

    def engine_gone(self) -> None:
        pass

    def engine_reported(self, report: StepReport) -> None:
        pass


class _Signals:
    """Set by the first and the second SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def take(self) -> None:
        """One more."""
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def _signals() -> Iterator[_Signals]:
    loop, signals = asyncio.get_running_loop(), _Signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.take)
    try:
        yield signals
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
