"""A process that runs a device, or one rank of it: it is started, called by number, and ended.

The process ends with this one, however this one ends: it sees the end of the socket, and on Linux
the kernel kills it with the thread that started it, which is one that lasts as long.
"""

import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Protocol

from coserve.devices.messages.commands import Reply
from coserve.devices.messages.steps import StepResult
from coserve.devices.process.wire import (
    Connection,
    FromDevice,
    KernelsPrepared,
    LoadingProgress,
    Raised,
    Started,
    framed,
)
from coserve.errors import DeviceGoneError, RankGoneError

_log = logging.getLogger(__name__)

# How long a process may take to end by itself.
_END_S = 5.0

Answer = Future[Reply | StepResult]


class StartedProcess(Protocol):
    """A process of `process.main`, as `subprocess.Popen` has it; for any thread."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End the process at once; no error if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        ...


StartProcess = Callable[[Sequence[str], Sequence[int]], StartedProcess]
"""Starts a process of `process.main`, given its arguments and the descriptors that these name,
which it inherits."""


def start_program(arguments: Sequence[str], descriptors: Sequence[int]) -> StartedProcess:
    """Start the process as a program, which imports all that it needs."""
    return subprocess.Popen(
        [sys.executable, "-m", "coserve.devices.process.main", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
    )


class DeviceProcess:
    """A process of `process.main`, and the connection to it; a thread receives what the process
    sends.
    """

    def __init__(
        self,
        on_start: Callable[[FromDevice | None], None],
        on_end: Callable[[], None] = lambda: None,
        *,
        arguments: Sequence[str] = (),
        inherited: Sequence[int] = (),
        start: StartProcess = start_program,
    ) -> None:
        """Start the process, which waits for its settings then.

        Args:
            on_start: Called with each message of the start, and with None once nothing can come any
                more.
            on_end: Called once the process has ended, or has closed its end, before its calls fail.
            arguments: Arguments for `process.main`, after the socket.
            inherited: File descriptors that the process gets.
            start: Starts the process.
        """
        own, its = socket.socketpair()
        self._connection = Connection(own, FromDevice)
        self._on_start, self._on_end = on_start, on_end
        self._calls: dict[int, Answer] = {}
        self._lock, self._has_ended = Lock(), False
        self.why_group_ends = ""
        """What the process has said last, if that is that its group cannot continue; ""
        otherwise."""
        started: Future[StartedProcess] = Future()

        def run() -> None:
            # The child has inherited its end: this process's copy must close, or EOF would never
            # come.
            with its:
                try:
                    self._process = start(
                        [str(its.fileno()), *arguments], [its.fileno(), *inherited]
                    )
                except BaseException as error:
                    started.set_exception(error)
                    return
            self._gone = f"the device's process ({self.pid}) has ended"
            started.set_result(self._process)
            self._receive()

        # It starts the process, too, which ends with the thread that has started it.
        self._receiver = Thread(target=run, name="device replies", daemon=True)
        self._receiver.start()
        try:
            started.result()
        except Exception:
            own.close()
            raise

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether nothing can come from the process any more."""
        return self._has_ended

    def returncode(self, wait_s: float = 0.0) -> int | None:
        """Return how the process has ended, negative for a signal; None if it has not within this
        time.
        """
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def send(self, message: object) -> None:
        """Send a message that has no answer, as the settings.

        Raises:
            DeviceGoneError: The process has ended.
        """
        self._send(framed(message))

    def call(self, number: int, frame: bytes) -> Answer:
        """Send a call with this number, as `framed` encodes it, and return the future of its
        answer.

        The answer is DeviceGoneError if the process ends first.

        Raises:
            DeviceGoneError: The process has ended already.
        """
        answer: Answer = Future()
        with self._lock:
            if self._has_ended:
                raise DeviceGoneError(self._gone)
            # Under the lock and before sending: the answer may come at once, or the end.
            self._calls[number] = answer
        self._send(frame)
        return answer

    def forget(self, number: int) -> None:
        """Expect no answer to a call any more."""
        with self._lock:
            self._calls.pop(number, None)

    def kill(self) -> None:
        """End the process at once, whatever it is doing; `close` waits for its end."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._connection.close()
        self._receiver.join()

    def _send(self, frame: bytes) -> None:
        try:
            self._connection.send_frame(frame)
        except OSError:
            raise DeviceGoneError(self._gone) from None

    def _receive(self) -> None:
        """Receive messages until nothing can come any more; calls that wait then fail."""
        try:
            while True:
                self._take(self._connection.receive())
        except EOFError:
            pass
        except Exception:
            _log.exception("what the device's process says cannot be understood")
            self._connection.close()  # which ends it
        with self._lock:
            # From here on `call` refuses, so that no future is left without an answer.
            self._has_ended = True
            calls, self._calls = self._calls, {}
        try:
            # Before calls fail: it finds out why the process ended, which their callers then
            # report.
            self._on_end()
        finally:
            for answer in calls.values():
                answer.set_exception(DeviceGoneError(self._gone))
            # After the calls: whoever waits for the start learns that nothing more comes.
            self._on_start(None)
            self._reap()

    def _take(self, message: FromDevice) -> None:
        if isinstance(message, LoadingProgress | KernelsPrepared | Started) or message.call is None:
            self._on_start(message)
            return
        with self._lock:
            answer = self._calls.pop(message.call)
        if isinstance(message, Raised):
            if message.kind == RankGoneError.__name__:
                self.why_group_ends = message.message
            answer.set_exception(message.error())
        else:
            answer.set_result(message.reply)

    def _reap(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
