"""Fork server: it starts engines by forking a process that has imported everything, which takes a
tenth of the time.

Importing PyTorch and transformers takes seconds of computing, in the server's process and in the
engine's; and a server whose engine has died has none to lose. So the server's process imports
everything once, before it has threads, and forks off a process that does nothing but fork engines
(as Python's `multiprocessing.forkserver` does, which would import everything again). No thread runs
at that moment, no parallel region of PyTorch has run, and no GPU was touched: none of the three
outlives a fork. If that process is killed, another one is started as a program, which imports
everything itself. A node of a cluster has none of its own: it connects to the one of its machine
(`shared_forks`).

The two are connected by a socket that preserves message boundaries. The server sends "fork" with
the engine's standard input, standard error and environment, or "kill"; the fork server answers that
the engine has exited, with its status. When the server ends, the socket closes, and the kernel ends
this process and with it the engine.
"""

import asyncio
import gc
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from coserve.engine_client.launch import Launched
from coserve.errors import CoserveError
from coserve.home import home_environment
from coserve.models.fast_imports import import_configurations, without_collections
from coserve.sandbox.parent_death import end_with_parent

_MAX_BYTES = 1 << 16


class _Fork(msgspec.Struct, tag=True, frozen=True):
    pass


class _Kill(msgspec.Struct, tag=True, frozen=True):
    pass


class _EngineExited(msgspec.Struct, tag=True, frozen=True):
    returncode: int
    """Status of the engine's process; the negative number of the signal that ended it."""


class ForkServer:
    """The server's end; one engine at a time. Belongs to the event loop that is running."""

    def __init__(
        self,
        run_engine: Callable[[], int] | None,
        model: str,
        *,
        connect: Callable[[str], Awaitable[socket.socket | None]] | None = None,
    ) -> None:
        """Fork the process. Must be called before there are threads, with everything imported that
        an engine needs.

        Args:
            run_engine: Runs an engine in its own process, and returns its status. None: this
                process cannot fork, and starts a program that can with the first engine.
            model: Model that engines serve, which decides what is imported.
            connect: Connects to a fork server that others use too, in place of such a program,
                given the model; returns None if there is none.
        """
        self._model, self._connect_to = model, connect
        self._pid: int | None = None  # the fork server, if it is a child of this process
        self._has_ended = True
        self._engine: _ForkedEngine | None = None
        if run_engine is not None:
            self._fork(run_engine)

    def _fork(self, run_engine: Callable[[], int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python also warns of numpy's idle threads, which handle a fork themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run(theirs, parent, run_engine)
        theirs.close()
        self._use(ours, pid)

    async def launch(self, line: bytes, home: Path | None) -> Launched:
        """Start an engine; see `coserve.engine_client.launch.Launch`."""
        assert self._engine is None or self._engine.returncode is not None, "one engine at a time"
        # The fork server was killed, or there has been none yet.
        if self._has_ended:
            shared = None if self._connect_to is None else await self._connect_to(self._model)
            if shared is not None:
                self._use(shared, None)
            else:
                self._start_another()
        # The engine's standard input, at whose end it ends: this process keeps the other side open.
        theirs, ours = os.pipe()
        environment = os.memfd_create("environment")  # may be larger than a message
        engine = self._engine = _ForkedEngine(self._kill, ours)
        try:
            with os.fdopen(environment, "wb", closefd=False) as file:
                own = os.environ | home_environment(home)
                file.write(
                    b"\0".join(os.fsencode(f"{name}={value}") for name, value in own.items())
                )
            socket.send_fds(self._socket, [msgspec.json.encode(_Fork())], [theirs, 2, environment])
            os.write(ours, line)  # fits into a pipe's buffer
        except OSError:  # the fork server has just ended, and the engine with it
            engine.end(-signal.SIGKILL)
        finally:
            os.close(theirs)
            os.close(environment)
        return engine

    def close(self) -> None:
        """End the process, and the engine if there is one."""
        if self._has_ended:
            return
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._forget()

    def _use(self, connected: socket.socket, pid: int | None) -> None:
        """Use a fork server.

        Args:
            connected: Socket to it.
            pid: Its process, if that is a child of this one.
        """
        self._socket, self._pid, self._has_ended = connected, pid, False
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _start_another(self) -> None:
        """Start a fork server as a program, since this process has threads by now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.set_inheritable(True)
        command = [
            sys.executable,
            "-m",
            __name__,
            str(theirs.fileno()),
            str(os.getpid()),
            self._model,
        ]
        pid = os.posix_spawn(sys.executable, command, os.environ)
        theirs.close()
        self._use(ours, pid)

    def _forget(self) -> None:
        """Close the socket of a process that has ended, or is about to, and reap it."""
        if not self._has_ended:
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            if self._pid is not None:
                os.waitpid(self._pid, 0)

    def _kill(self) -> None:
        with suppress(OSError):
            self._socket.send(msgspec.json.encode(_Kill()))

    def _read(self) -> None:
        try:
            message = self._socket.recv(_MAX_BYTES)
        except OSError:
            message = b""
        # The end of the fork server is the end of its engine.
        returncode = (
            msgspec.json.decode(message, type=_EngineExited).returncode
            if message
            else -signal.SIGKILL
        )
        if not message:
            self._forget()
        if self._engine is not None:
            self._engine.end(returncode)


class _ForkedEngine:
    """An engine's process; see `Launched`."""

    def __init__(self, kill: Callable[[], None], stdin: int) -> None:
        self._kill, self._stdin = kill, stdin
        self._returncode: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._returncode.result() if self._returncode.done() else None

    def kill(self) -> None:
        self._kill()

    async def wait(self) -> int:
        return await asyncio.shield(self._returncode)

    def end(self, returncode: int) -> None:
        """Note that the process has ended."""
        if not self._returncode.done():
            self._returncode.set_result(returncode)
            os.close(self._stdin)


# -- the process that forks -----------------------------------------------------------------------


def import_for_engines(model: str) -> Callable[[], int]:
    """Import everything that an engine of a model needs, and return the function that runs an
    engine.
    """
    with without_collections():
        from coserve.models.source import find_model
        from coserve.worker.process import main as run_engine

        import_configurations()
        with suppress(CoserveError):  # the engine reports it
            find_model(model, with_weights=False)  # imports what transformers needs for its family
    return run_engine


def serve_connection(control: socket.socket, run_engine: Callable[[], int]) -> NoReturn:
    """Serve one connection in a process that was forked off for it, and end with it."""
    _run(control, None, run_engine)


def _run(control: socket.socket, server: int | None, run_engine: Callable[[], int]) -> NoReturn:
    """Run the whole life of the process, which never returns to its caller's stack.

    Args:
        control: Socket to the server.
        server: Parent process, with whose end this one ends; None: there is no such parent.
        run_engine: Runs an engine.
    """
    try:
        if server is not None:
            end_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # left to the server
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(control.fileno())
        gc.freeze()  # collections in engines leave these objects, and so their shared pages, alone
        if server in (None, os.getppid()):  # otherwise it ended before `end_with_parent`
            _fork_engines(control, run_engine)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _fork_engines(control: socket.socket, run_engine: Callable[[], int]) -> None:
    engine: tuple[int, int] | None = None  # its process and pidfd
    while True:
        files = [control.fileno()] if engine is None else [control.fileno(), engine[1]]
        ready, _, _ = select.select(files, [], [])
        # The end of an engine comes before the command that may ask for the next one.
        if engine is not None and engine[1] in ready:
            _, status = os.waitpid(engine[0], 0)
            os.close(engine[1])
            engine = None
            control.send(msgspec.json.encode(_EngineExited(os.waitstatus_to_exitcode(status))))
        if control.fileno() not in ready:
            continue
        message, passed, _, _ = socket.recv_fds(control, _MAX_BYTES, 3)
        if not message:
            return
        command = msgspec.json.decode(message, type=_Fork | _Kill)
        if isinstance(command, _Fork):
            pid = os.fork()
            if pid == 0:
                control.close()
                _run_engine(passed, run_engine)
            for each in passed:
                os.close(each)
            engine = pid, os.pidfd_open(pid)
        elif engine is not None:
            signal.pidfd_send_signal(engine[1], signal.SIGKILL)


def _run_engine(passed: Sequence[int], run_engine: Callable[[], int]) -> NoReturn:
    """Run an engine in this process.

    Args:
        passed: Files of its standard input, its standard error and its environment.
        run_engine: Runs the engine, and returns its status.
    """
    status = 1
    try:
        stdin, stderr, environment = passed
        os.dup2(stdin, 0)
        os.dup2(stderr, 2)
        # Output goes to the log: nobody reads this process's standard output.
        os.dup2(2, 1)
        os.close(stdin)
        os.close(stderr)
        # The file's position is shared with the writer, who has left it at the end.
        os.lseek(environment, 0, os.SEEK_SET)
        with os.fdopen(environment, "rb") as file:
            variables = os.fsdecode(file.read()).split("\0")
        os.environ.clear()
        os.environ.update(dict(each.split("=", 1) for each in variables if each))
        status = run_engine()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _close_all_but(kept: int) -> None:
    """Close all inherited files, so that the server's port and home are not held here."""
    first = 3
    os.closerange(first, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def main() -> NoReturn:
    """Run as a program. Arguments are the number of its socket, the server's process, and the
    model.
    """
    control, server = map(int, sys.argv[1:3])
    _run(socket.socket(fileno=control), server, import_for_engines(sys.argv[3]))


if __name__ == "__main__":
    main()
