"""A torch device in another process, over a socket pair: the engine plans and serves while it works.

The process ends with this one, however this one ends: it sees the end of the socket, whatever it is doing.
"""

import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread

from coserve.devices.clock import WallClock
from coserve.devices.messages import Command, Reply, StepBatch, StepResult
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.devices.wire import Call, Connection, Done, FromDevice, LoadingProgress, Raised, Started
from coserve.errors import DeviceGoneError

_GONE = "the device's process has ended"
# How long it may take to end by itself.
_END_S = 5.0


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
        self._calls: dict[int, Future[Reply]] = {}
        self._steps: SimpleQueue[StepResult | Exception] = SimpleQueue()
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
        reply: Future[Reply] = Future()
        with self._lock:
            if self._gone:
                raise DeviceGoneError(_GONE)
            call = next(self._numbers)
            self._calls[call] = reply
        self._send(Call(call, command))
        return reply.result()

    def submit(self, batch: StepBatch) -> None:
        with suppress(OSError):  # `collect` will say so
            self._connection.send(batch)

    def collect(self) -> StepResult:
        """DeviceGoneError if the process has ended."""
        result = self._steps.get()
        if isinstance(result, Exception):
            if isinstance(result, DeviceGoneError):
                self._steps.put(result)  # for the next call
            raise result
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

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise DeviceGoneError(_GONE) from None

    def _wait_for_start(self, progress: LoadProgress | None) -> Started:
        while True:
            try:
                message = self._connection.receive()
            except EOFError:
                raise DeviceGoneError(f"{_GONE} before it was ready") from None
            if isinstance(message, Raised):
                raise message.error()
            if isinstance(message, Started):
                return message
            assert isinstance(message, LoadingProgress)
            if progress is not None:
                progress(message.stage, message.done, message.total)

    def _receive(self) -> None:
        """Hand out what comes, until nothing can come any more."""
        try:
            while True:
                self._take(self._connection.receive())
        except EOFError:
            with self._lock:
                self._gone = True
                calls, self._calls = self._calls, {}
            for call in calls.values():
                call.set_exception(DeviceGoneError(_GONE))
            self._steps.put(DeviceGoneError(_GONE))

    def _take(self, message: Done | Raised | StepResult) -> None:
        if isinstance(message, StepResult):
            self._steps.put(message)
        elif message.call is None:
            assert isinstance(message, Raised)
            self._steps.put(message.error())
        else:
            with self._lock:
                reply = self._calls.pop(message.call)
            if isinstance(message, Raised):
                reply.set_exception(message.error())
            else:
                reply.set_result(message.reply)
