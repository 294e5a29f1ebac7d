"""A torch device in another process, over a socket pair: the engine plans and serves while it
works.
"""

from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue

from coserve.devices.base import WallClock
from coserve.devices.messages.commands import Command, Reply
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.process.child import Answer, DeviceProcess
from coserve.devices.process.wire import Call, FromDevice, LoadingProgress, Raised, Started, framed
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.errors import DeviceGoneError


class ProcessDevice:
    """Device in another process; see `coserve.devices.base.Device`."""

    def __init__(self, settings: DeviceSettings, progress: LoadProgress | None = None) -> None:
        """Start the process, and wait until the model is loaded.

        Raises:
            DeviceGoneError: The process has ended without saying why.
            Exception: As `coserve.devices.loading.open_device`.
        """
        self.clock = WallClock()
        self._numbers = count()
        self._step: Answer | None = None  # under way
        messages: SimpleQueue[FromDevice | None] = SimpleQueue()
        self._process = DeviceProcess(messages.put)
        try:
            self._process.send(settings)
            self.info = _wait_for_start(messages, progress).info
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the number of the device's process."""
        return self._process.pid

    def execute(self, command: Command) -> Reply:
        """Carry out a command, and return its reply.

        Raises:
            DeviceGoneError: The process ends before it has replied.
        """
        reply = self._call(command).result()
        assert not isinstance(reply, StepResult)
        return reply

    def submit(self, batch: StepBatch) -> None:
        # Each step has a number of its own: the result of one that was forgotten is nobody's when
        # it comes.
        self._step = None
        try:
            self._step = self._call(batch)
        except DeviceGoneError as error:  # `collect` will say so
            self._step = Future()
            self._step.set_exception(error)

    def collect(self) -> StepResult:
        """Wait for the step, and return its result.

        Raises:
            DeviceGoneError: The process has ended.
        """
        step, self._step = self._step, None
        assert step is not None, "no step was submitted"
        result = step.result()
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        self._process.close()

    def _call(self, command: Command | StepBatch) -> Answer:
        number = next(self._numbers)
        return self._process.call(number, framed(Call(number, command)))


def _wait_for_start(
    messages: "SimpleQueue[FromDevice | None]", progress: LoadProgress | None
) -> Started:
    while (message := messages.get()) is not None:
        if isinstance(message, Raised):
            raise message.error()
        if isinstance(message, Started):
            return message
        assert isinstance(message, LoadingProgress)
        if progress is not None:
            progress(message.stage, message.done, message.total)
    raise DeviceGoneError("the device's process has ended before it was ready")
