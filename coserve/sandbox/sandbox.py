"""Runner of a task's calls in processes of their own, so that a crash or a leak fails one call.

A template process (`template.py`) prepares the task once and forks a process for each call, which
shares the prepared state and starts within milliseconds. It inherits no open files and only those
environment variables that Python needs. It starts with the first call, and again after it has died;
`rest` ends it until the next call.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

import coserve
from coserve.errors import SandboxError
from coserve.sandbox.task import CallExit, CallLimits, Failure, SandboxTask, task_name
from coserve.sandbox.template import LENGTH, OUT_OF_MEMORY, UNSTARTED

_log = logging.getLogger(__name__)

# Environment variables that the processes get: what the interpreter and the dynamic linker need,
# and no secrets.
_ENVIRONMENT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "VIRTUAL_ENV",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
)
# Seconds by which an answer may come after the limit of its call: preparing the task, and a busy
# machine.
_GRACE_S = 60.0
_MAX_REPLY_BYTES = 64 << 20
_MESSAGES: dict[Failure, str] = {
    "crashed": "it crashed the process that ran it",
    "memory": "it needs more than {memory_mb} MB of memory, the limit",
    "time": "it takes more than {cpu_s} s of CPU time, the limit",
    "killed": "the process that ran it was killed from outside",
    "unstarted": "no process could be started for it",
    "late": "it did not finish within {wall_s:.0f} s",
}


def has_sandboxes() -> bool:
    """Return whether sandboxes work here: only Linux enforces memory limits of processes."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class Sandbox:
    """Sandbox of one task; threads may call it at once, each call in a process of its own."""

    def __init__(
        self, task: type[SandboxTask], setup: Any, limits: CallLimits | None = None
    ) -> None:
        """Create a sandbox without starting a process.

        Args:
            task: Class of the task.
            setup: Argument of its constructor.
            limits: Limits of each call.
        """
        self._task, self._limits = task, limits or CallLimits()
        self._setup = msgspec.msgpack.encode(setup)
        self._template: _Template | None = None
        self._lock = Lock()
        self._num_calls = 0  # under way

    @property
    def pid(self) -> int | None:
        """Process id of the template; None if it is not running."""
        return None if self._template is None else self._template.pid

    def run(self, call: Any) -> Any:
        """Run a call, and return its reply. Blocks.

        Raises:
            SandboxError: The call failed.
        """
        sent = msgspec.msgpack.encode(call)
        with self._lock:
            self._num_calls += 1
        try:
            return self._reply(sent)
        finally:
            with self._lock:
                self._num_calls -= 1

    def _reply(self, sent: bytes) -> Any:
        # A template that has died is replaced once, and the call repeated.
        for is_last in (False, True):
            template = self._running_template()
            outcome = template.call(sent, self._limits.wall_s + _GRACE_S)
            if outcome is not None:
                return self._read(*outcome)
            self._replace(template)
            if is_last:
                raise self._error("late", "the template process has ended")
        raise AssertionError

    def rest(self) -> None:
        """End the template unless calls are running; the next call starts another one."""
        with self._lock:
            if self._num_calls or self._template is None:
                return
            template, self._template = self._template, None
        template.close()

    def close(self) -> None:
        """End all processes; running calls fail."""
        with self._lock:
            template, self._template = self._template, None
        if template is not None:
            template.close()

    def _running_template(self) -> "_Template":
        with self._lock:
            if self._template is None:
                self._template = _Template(self._task, self._setup, self._limits)
            return self._template

    def _replace(self, ended: "_Template") -> None:
        with self._lock:
            if self._template is ended:
                self._template = None
        ended.close()

    def _read(self, reply: bytes, ended: CallExit) -> Any:
        if ended.status == 0:
            return msgspec.msgpack.decode(reply, type=self._task.reply_type)
        raise self._error(self._failure(ended), ended.stderr)

    def _failure(self, ended: CallExit) -> Failure:
        if ended.status == -signal.SIGXCPU:
            return "time"
        if ended.status == -signal.SIGKILL:
            return "killed"  # as the kernel does where the machine has no memory
        if ended.status == -signal.SIGALRM:
            return "late"
        if ended.status == UNSTARTED:
            return "unstarted"
        # As Rust and C++ say it before they abort.
        no_memory = "memory allocation of" in ended.stderr or "bad_alloc" in ended.stderr
        return "memory" if no_memory or ended.status == OUT_OF_MEMORY else "crashed"

    def _error(self, failure: Failure, reason: str) -> SandboxError:
        limits = self._limits
        message = _MESSAGES[failure].format(
            memory_mb=limits.memory_bytes >> 20, cpu_s=limits.cpu_s, wall_s=limits.wall_s
        )
        level = logging.WARNING if failure in ("crashed", "unstarted") else logging.DEBUG
        _log.log(
            level,
            "a call of %s has no result: %s (%s)",
            self._task.__name__,
            message,
            " ".join(reason.split())[-300:],
        )
        return SandboxError(message, failure=failure)


class _Template:
    """The template process, seen from the process that started it."""

    def __init__(self, task: type[SandboxTask], setup: bytes, limits: CallLimits) -> None:
        self._control, theirs = socket.socketpair()
        name, bounds = task_name(task), msgspec.json.encode(limits).decode()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "coserve.sandbox.template",
                    str(theirs.fileno()),
                    name,
                    bounds,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                cwd="/",
            )
        self._lock = Lock()
        # Also for a sandbox that is dropped without being closed.
        self.close = weakref.finalize(self, _end, self._process, self._control)
        with suppress(OSError):  # a call finds out
            self._control.sendall(LENGTH.pack(len(setup)) + setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, sent: bytes, limit_s: float) -> tuple[bytes, CallExit] | None:
        """Return the reply of a call, and the exit of its process; None if the template does not
        answer.
        """
        until_s = time.monotonic() + limit_s
        data, theirs = socket.socketpair()
        report, written = os.pipe()
        try:
            with data:
                try:
                    with theirs, self._lock:
                        socket.send_fds(self._control, [b"c"], [theirs.fileno(), written])
                finally:
                    # The template holds the only copy then, so that its end ends the pipe.
                    os.close(written)
                reply = _exchanged(data, sent, until_s)
            ended = _read_until(report, until_s)
        except (OSError, TimeoutError):
            return None
        finally:
            os.close(report)
        return (reply, msgspec.msgpack.decode(ended, type=CallExit)) if ended else None


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    """End a template, and its children with it."""
    control.close()
    process.kill()
    process.wait()


def _exchanged(data: socket.socket, sent: bytes, until_s: float) -> bytes:
    """Send a call, and return all data until the other end is closed.

    Raises:
        TimeoutError: The time is over.
    """
    data.setblocking(False)
    with suppress(BrokenPipeError, ConnectionResetError):
        rest = memoryview(sent)
        while rest:
            _wait_for(data.fileno(), select.POLLOUT, until_s)
            rest = rest[data.send(rest) :]
        data.shutdown(socket.SHUT_WR)
    return _read_until(data.fileno(), until_s)


def _read_until(file: int, until_s: float) -> bytes:
    """Return all data until the other end is closed.

    Raises:
        TimeoutError: The time is over.
    """
    received = bytearray()
    while True:
        _wait_for(file, select.POLLIN, until_s)
        try:
            some = os.read(file, 1 << 20)
        except ConnectionResetError:
            return bytes(received)
        received += some
        if not some:
            return bytes(received)
        if len(received) > _MAX_REPLY_BYTES:
            raise TimeoutError("the reply is incomplete")


def _wait_for(file: int, event: int, until_s: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    left_ms = max(0.0, until_s - time.monotonic()) * 1e3
    if not poll.poll(left_ms):
        raise TimeoutError


def _environment() -> dict[str, str]:
    """Return the environment of the processes, in which they find this package where this process
    does.
    """
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    paths = [str(Path(coserve.__file__).parents[1]), *filter(None, sys.path)]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
