"""Starts engines by forking a process that has imported everything, which takes a tenth of the time.

Importing PyTorch and transformers takes seconds of computing, in the server's process and in the engine's; and a server
whose engine has died has none to lose. So the server's process imports everything once, before it has threads, and
forks off a process that does nothing but fork engines (as Python's `multiprocessing.forkserver` does, which would
import everything again). No thread runs at that moment, no parallel region of PyTorch has run, and no GPU was touched:
none of the three outlives a fork. If somebody ends that process, another one is started as a program, which imports
everything itself.

Between the two lies a socket that keeps messages apart: "fork" with the engine's standard input, or "kill"; and back,
"ended" with how. When the server ends, the socket closes, and the kernel ends this process and with it the engine.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from coserve.devices.parent_death import end_with_parent
from coserve.errors import CoserveError
from coserve.home import home_environment
from coserve.worker.launch import Launched

_MOST_BYTES = 1 << 16


class _Fork(msgspec.Struct, tag=True, frozen=True):
    environment: dict[str, str]  # what is to be different


class _Kill(msgspec.Struct, tag=True, frozen=True):
    pass


class _Ended(msgspec.Struct, tag=True, frozen=True):
    returncode: int


class ForkServer:
    """The server's end; one engine at a time. Belongs to the event loop that is running."""

    def __init__(self, run_engine: Callable[[], int] | None, model: str) -> None:
        """Fork. To be called before there are threads, with everything imported that an engine needs.

        run_engine: an engine's life, in its own process; returns its status. None: this process cannot fork, and with
        the first engine starts a program that can. model: that engines serve, for what that needs to be imported.
        """
        self._model = model
        self._has_ended = True
        self._engine: _ForkedEngine | None = None
        if run_engine is not None:
            self._fork(run_engine)

    def _fork(self, run_engine: Callable[[], int]) -> None:
        theirs = self._connect()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of numpy's idle threads, too, which look after themselves at a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _run(theirs, parent, run_engine)
        theirs.close()
        self._has_ended = False

    async def launch(self, line: bytes, home: Path | None) -> Launched:
        """An engine; see `coserve.worker.launch.Launch`."""
        assert self._engine is None or self._engine.returncode is not None, "one engine at a time"
        if self._has_ended:
            self._start_another()
        theirs, ours = os.pipe()
        engine = self._engine = _ForkedEngine(self._kill, ours)
        try:
            message = msgspec.json.encode(_Fork(home_environment(home)))
            socket.send_fds(self._socket, [message], [theirs])
            os.write(ours, line)  # far less than a pipe holds
        except OSError:  # it has ended at this moment, and so has the engine
            engine.end(-signal.SIGKILL)
        finally:
            os.close(theirs)
        return engine

    def close(self) -> None:
        """End it, and the engine if there is one."""
        if self._has_ended:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._forget()

    def _connect(self) -> socket.socket:
        """A new socket; returns its other end."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return theirs

    def _start_another(self) -> None:
        """As a program: this process has threads by now."""
        theirs = self._connect()
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), self._model]
        self._pid = os.posix_spawn(sys.executable, command, os.environ)
        theirs.close()
        self._has_ended = False

    def _forget(self) -> None:
        """It has ended, or is about to."""
        if not self._has_ended:
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            os.waitpid(self._pid, 0)

    def _kill(self) -> None:
        with suppress(OSError):
            self._socket.send(msgspec.json.encode(_Kill()))

    def _read(self) -> None:
        try:
            message = self._socket.recv(_MOST_BYTES)
        except OSError:
            message = b""
        # Without the one that forks, there is no engine either.
        returncode = msgspec.json.decode(message, type=_Ended).returncode if message else -signal.SIGKILL
        if not message:
            self._forget()
        if self._engine is not None:
            self._engine.end(returncode)


class _ForkedEngine:
    """One engine's process; see `Launched`."""

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
        """It has ended."""
        if not self._returncode.done():
            self._returncode.set_result(returncode)
            os.close(self._stdin)


# -- the process that forks -----------------------------------------------------------------------


def _run(control: socket.socket, server: int, run_engine: Callable[[], int]) -> NoReturn:
    """All of its life. Whatever happens, the caller's stack is not to be returned to in this process."""
    try:
        end_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server's affair
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(control.fileno())
        gc.freeze()  # what is there stays, and is not touched by collections in engines
        if os.getppid() == server:  # or it has ended before the kernel was told
            _fork_engines(control, run_engine)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _fork_engines(control: socket.socket, run_engine: Callable[[], int]) -> None:
    engine: tuple[int, int] | None = None  # the process, and what tells of its end
    while True:
        files = [control.fileno()] if engine is None else [control.fileno(), engine[1]]
        ready, _, _ = select.select(files, [], [])
        if engine is not None and engine[1] in ready:
            _, status = os.waitpid(engine[0], 0)
            os.close(engine[1])
            engine = None
            control.send(msgspec.json.encode(_Ended(os.waitstatus_to_exitcode(status))))
        if control.fileno() not in ready:
            continue
        message, passed, _, _ = socket.recv_fds(control, _MOST_BYTES, 1)
        if not message:
            return
        command = msgspec.json.decode(message, type=_Fork | _Kill)
        if isinstance(command, _Fork):
            pid = os.fork()
            if pid == 0:
                control.close()
                _run_engine(passed[0], command.environment, run_engine)
            os.close(passed[0])
            engine = pid, os.pidfd_open(pid)
        elif engine is not None:
            signal.pidfd_send_signal(engine[1], signal.SIGKILL)


def _run_engine(stdin: int, environment: dict[str, str], run_engine: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.dup2(2, 1)
        os.environ.update(environment)
        status = run_engine()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _close_all_but(kept: int) -> None:
    """Let go of what else the server has open: its port and its home are not to be held here."""
    first = 3
    os.closerange(first, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def main() -> NoReturn:
    """Of one that is a program: the number of its socket, and of the server's process; the model."""
    from coserve.models.source import find_model
    from coserve.worker.process import main as run_engine

    control, server = map(int, sys.argv[1:3])
    with suppress(CoserveError):  # which the engine says
        find_model(sys.argv[3], with_weights=False)  # with what transformers needs for its family
    _run(socket.socket(fileno=control), server, run_engine)


if __name__ == "__main__":
    main()
