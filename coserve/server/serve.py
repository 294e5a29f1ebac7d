"""Life of a server: it listens at once, starts the engine, serves, and ends on a signal.

On a signal, new requests are refused and open streams may continue for a while. Then the engine
writes checkpoints of its jobs and ends, and nothing of it remains. A second signal ends the
waiting.
"""

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from coserve.engine_client.access import EngineAccess
from coserve.engine_client.fork_server import ForkServer
from coserve.engine_client.link import EngineLink, engine_here
from coserve.errors import CoserveError
from coserve.home import private_files
from coserve.jobs.files.remote_files import files_url
from coserve.models.fast_imports import import_configurations, without_collections
from coserve.models.source import find_model
from coserve.protocol.messages import EngineSettings, Ready, StartProgress, StepReport
from coserve.protocol.run_directory import clear_socket_directories
from coserve.server.adapters.catalogue import GivenAdapters
from coserve.server.app import create_app
from coserve.server.config import ServerConfig
from coserve.server.context import ServerContext
from coserve.server.http.connections import (
    ACCEPT_AT_ONCE,
    Connections,
    most_connections,
    protocol_of,
)
from coserve.server.lifecycle.home_lock import lock_home
from coserve.server.lifecycle.job_service import start_jobs, stop_batches, stop_jobs
from coserve.server.lifecycle.running import RunningServer, announced, reachable_url
from coserve.server.observability.tracing import open_tracing
from coserve.server.tenancy.keys_file import tenant_weights
from coserve.server.text.prompts import Prompts, template_of
from coserve.worker.process import main as run_engine

_log = logging.getLogger(__name__)

# Seconds for sending answers that are complete.
_LAST_ANSWERS_S = 5
# Connections that the system keeps until they are accepted.
_BACKLOG = 2048
_POLL_S = 0.05


class Watcher(Protocol):
    """Display of the server's start and end."""

    def progress(self, progress: StartProgress) -> None:
        """Show the progress of the start."""
        ...

    def ready(self, ready: Ready, context: ServerContext, url: str) -> None:
        """Show that requests are answered from now on; called once."""
        ...

    def stopping(self, num_open: int, drain_s: float) -> None:
        """Show that a signal has arrived; called once.

        Args:
            num_open: Number of requests that are waited for.
            drain_s: Maximum time of waiting.
        """
        ...


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `serve`, and waiting connections to the system."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # asyncio takes one number for both: how many the system keeps, and how many are accepted
        # before any is looked at, of which each may be one too many.
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        CoserveError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # Lets the system detect clients whose machine is gone.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listening.listen(_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CoserveError(
            f"cannot listen at {host}:{port}: {reason}; choose another --port or --host"
        ) from None
    return listening


async def serve(config: ServerConfig, watcher: Watcher) -> None:
    """Serve until a signal arrives.

    Raises:
        ModelError: The engine cannot start with this configuration.
        CoserveError: The port or the home cannot be used.
    """
    with private_files(), lock_home(config.directory):
        clear_socket_directories(config.directory)
        await _serve_at_home(config, watcher)


async def _serve_at_home(config: ServerConfig, watcher: Watcher) -> None:
    check_certificate(config.ssl_certfile, config.ssl_keyfile)
    listening = listen(config.host, config.port)
    host, port = listening.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    reached_at = reachable_url(scheme, host, port)
    fork_server = _start_fork_server(config, watcher)
    engine = engine_here(
        engine_settings(config),
        launch=None if fork_server is None else fork_server.launch,
        home=config.directory,
        timeout_s=config.engine_timeout_s,
    )
    link = EngineLink(engine, on_progress=watcher.progress)
    context = server_context(config, link)
    first = _FirstReady()
    context.link.listen(first)
    server = _Server(_http_settings(config, create_app(context)))
    try:
        with _signals() as signalled, _reloading(context), ExitStack() as until_end:
            here = RunningServer(url=reached_at, model=context.models.name, pid=os.getpid())
            found_meanwhile = partial(until_end.enter_context, announced(here))
            announce = partial(_announce, context, first, watcher, url, found_meanwhile)
            await _serve(server, listening, context, signalled, watcher, announce)
    finally:
        listening.close()
        await close_context(context)
        if fork_server is not None:
            fork_server.close()


def server_context(config: ServerConfig, link: EngineAccess) -> ServerContext:
    """Return the parts of a server; `close_context` must be called at its end.

    Raises:
        CoserveError: A template, an adapter or the collector's address cannot be used.
    """
    prompts = Prompts(config.model, config.generation_config, template_of(config.chat_template))
    context = ServerContext(
        config=config, link=link, prompts=prompts, tracing=open_tracing(config.otlp_endpoint)
    )
    models = context.models
    models.catalogues.append(
        GivenAdapters(config.lora_modules, base=models.name, taken=models.base_names)
    )
    return context


async def close_context(context: ServerContext) -> None:
    """End the threads of a server, and send its remaining traces."""
    context.prompts.close()
    context.generation.grammar_checks.close()
    context.bodies.close()
    if context.tracing is not None:
        await asyncio.to_thread(context.tracing.close)


def engine_settings(config: ServerConfig) -> EngineSettings:
    """Return the settings of a server's engine."""
    weights = tenant_weights(config.engine.tenant_weights, config.api_keys_file)
    return EngineSettings(
        address="",
        model=config.model,
        dtype=config.dtype,
        weights=config.weights,
        device=config.device,
        threads=config.threads,
        record=None if config.record is None else str(Path(config.record).absolute()),
        role=config.role,
        prefill_socket=None
        if config.prefill_socket is None
        else str(Path(config.prefill_socket).absolute()),
        prefill_min_tokens=config.prefill_min_tokens,
        max_model_len=config.max_model_len,
        log_format=config.log_format,
        log_level=config.log_level,
        files_url=files_url(config.files_url),
        # A recording is to be run again with the predictions that it was made with.
        measures_first=config.measures_first or config.record is not None,
        engine=replace(config.engine, tenant_weights=weights),
    )


def _start_fork_server(config: ServerConfig, watcher: Watcher) -> ForkServer | None:
    """Start the fork server of engines; None where frameworks do not survive a fork (macOS).

    It is started before this process has threads. It imports what this process has to import
    anyway, to read the model's tokenizer.

    Raises:
        ModelError: There is no such model.
    """
    if sys.platform != "linux":
        return None
    watcher.progress(StartProgress(f"reading the configuration of {config.model}", 0, 0))
    with without_collections():
        import_configurations()
        find_model(config.model, with_weights=False)  # with what transformers needs for its family
    return ForkServer(run_engine, config.model)


def _http_settings(config: ServerConfig, app: FastAPI) -> uvicorn.Config:
    connections = Connections(
        most=most_connections(config.max_connections), timeout_headers_s=config.timeout_headers_s
    )
    return uvicorn.Config(
        app,
        http=protocol_of(connections),
        ws="none",
        log_config=None,
        access_log=False,
        backlog=ACCEPT_AT_ONCE,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        # Given to the event loop, which takes a float.
        timeout_keep_alive=config.timeout_keep_alive_s,  # type: ignore[arg-type]
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        lifespan="off",
    )


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Check a certificate and its key.

    Raises:
        CoserveError: They cannot be used.
    """
    if certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certfile, keyfile, password=lambda: ""
        )
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {certfile}" + (f" and --ssl-keyfile {keyfile}" if keyfile else "")
        raise CoserveError(f"{files} cannot be used: {error.strerror or error}") from None


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
        # A start that fails raises its error here; otherwise the server runs from now on.
        if starting.done():
            starting.result()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if signalled.first.is_set():
            await stop_batches(context)
            watcher.stopping(context.link.num_open, context.config.drain_s)
            await _drain(context, signalled)
    finally:
        # The engine ends first, with checkpoints, and open streams with it. The store is closed
        # last, when the engine's last reports are on record.
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


async def _announce(
    context: ServerContext,
    first: "_FirstReady",
    watcher: Watcher,
    url: str,
    found_meanwhile: Callable[[], None],
) -> None:
    """Load what this process needs of the model, and announce the server when all is ready.

    Args:
        context: Parts of the server.
        first: Listener for the first engine.
        watcher: Display.
        url: URL of the server.
        found_meanwhile: Function that lets commands of this user find the server until it ends.
    """
    await context.prompts.load()
    await context.generation.public_prefixes.load(context.prompts)
    await start_jobs(context)
    ready = await first.ready
    found_meanwhile()
    watcher.ready(ready, context, url)


async def _drain(context: ServerContext, signalled: "_Signals") -> None:
    """Let streams end, for a limited time."""
    context.link.close_to_requests()
    until_s = asyncio.get_running_loop().time() + context.config.drain_s
    while (
        context.link.num_open
        and asyncio.get_running_loop().time() < until_s
        and not signalled.second.is_set()
    ):
        if context.link.is_silent:  # the engine will send no more chunks
            break
        await asyncio.sleep(_POLL_S)
    context.link.fail_open_requests("the server is shutting down")


class _FirstReady:
    """Listener that waits for the first engine."""

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
    """Events of the first and the second SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def take(self) -> None:
        """Count a signal."""
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def _reloading(context: ServerContext) -> Iterator[None]:
    """Read the keys file again on SIGHUP; without such a file, SIGHUP ends the server as usual."""
    if context.config.api_keys_file is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, context.keys.reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


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
