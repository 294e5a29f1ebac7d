"""A torch device in another process, over a socket pair: the engine plans and serves while it works.

The process ends with this one, however this one ends: it sees the end of the socket, and on Linux the kernel kills it
with the thread that started it, so start it in one that lasts.
"""

import logging
import socket
import subprocess
import sys
from concurrent.futures import Future
from itertools import count
from threading import Lock, Thread

import msgspec

from coserve.devices.clock import WallClock
from coserve.devices.messages import Command, Reply
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.devices.step_messages import StepBatch, StepResult
from coserve.devices.wire import Call, Connection, Done, FromDevice, LoadingProgress, Raised, Started
from coserve.errors import DeviceGoneError

_log = logging.getLogger(__name__)

_GONE = "the device's process has ended"
# How long it may take to end by itself.
_END_S = 5.0

_Answer = Future[Reply | StepResult]


class ProcessDevice:
    """See `coserve.devices.base.Device`."""

    def __init__(self, settings: DeviceSettings, progress: LoadProgress | None = None) -> None:
        """Start the process, and wait until the model is loaded; errors as `coserve.devices.loading.open_device`, and
        DeviceGoneError if the process ends without saying why.
        """
        self.clock = WallClock()
        own, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coserve.devices.process_main", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
            )
        self._connection = Connection(own, FromDevice)
        self._calls: dict[int, _Answer] = {}
        self._step: _Answer | None = None  # under way
        self._numbers, self._lock, self._gone = count(), Lock(), False
        self._receiver = Thread(target=self._receive, name="device replies", daemon=True)
        try:
            self._send(settings)
            self.info = self._wait_for_start(progress).info
        except BaseException:
            self.close()
            raise
        self._receiver.start()

    @property
    def pid(self) -> int:
        """Of the device's process."""
        return self._process.pid

    def execute(self, command: Command) -> Reply:
        """DeviceGoneError if the process ends before it has replied."""
        reply = self._call(command).result()
        assert not isinstance(reply, StepResult)
        return reply

    def submit(self, batch: StepBatch) -> None:
        # Each step has a number of its own: the result of one that was forgotten is nobody's when it comes.
        self._step = None
        try:
            self._step = self._call(batch)
        except DeviceGoneError as error:  # `collect` will say so
            self._step = Future()
            self._step.set_exception(error)

    def collect(self) -> StepResult:
        """DeviceGoneError if the process has ended."""
        step, self._step = self._step, None
        assert step is not None, "no step was submitted"
        result = step.result()
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._receiver.is_alive():
            self._receiver.join()

    def _call(self, command: Command | StepBatch) -> _Answer:
        answer: _Answer = Future()
        with self._lock:
            if self._gone:
                raise DeviceGoneError(_GONE)
            call = next(self._numbers)
            self._calls[call] = answer
        self._send(Call(call, command))
        return answer

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise DeviceGoneError(_GONE) from None

    def _wait_for_start(self, progress: LoadProgress | None) -> Started:
        while True:
            try:
                message = self._connection.receive()
            except (EOFError, msgspec.DecodeError):
                raise DeviceGoneError(f"{_GONE} before it was ready") from None
            if isinstance(message, Raised):
                raise message.error()
            if isinstance(message, Started):
                return message
            assert isinstance(message, LoadingProgress)
            if progress is not None:
                progress(message.stage, message.done, message.total)

    def _receive(self) -> None:
        """Hand out what comes, until nothing can come any more: nobody waits for a device that is gone."""
        try:
            while True:
                self._take(self._connection.receive())
        except EOFError:
            pass
        except Exception:
            _log.exception("what the device's process says cannot be understood")
            self._connection.close()  # which ends it
        with self._lock:
            self._gone = True
            calls, self._calls = self._calls, {}
        for answer in calls.values():
            answer.set_exception(DeviceGoneError(_GONE))

    def _take(self, message: Done | Raised) -> None:
        assert message.call is not None, "only the start has no number"
        with self._lock:
            answer = self._calls.pop(message.call)
        if isinstance(message, Raised):
            answer.set_exception(message.error())
        else:
            answer.set_result(message.reply)
