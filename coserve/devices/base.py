"""Interface that the engine has to a device: in this process, in another one, or modelled."""

import time
from typing import Protocol

from coserve.devices.messages.commands import (
    BESIDE_STEPS,
    Command,
    CommandsCounted,
    CountCommands,
    DeviceInfo,
    Reply,
)
from coserve.devices.messages.steps import StepBatch, StepResult

_NOT_COUNTED = (*BESIDE_STEPS, CountCommands)


class Clock(Protocol):
    """Clock that counts seconds since some moment."""

    def now(self) -> float:
        """Return the seconds."""
        ...


class WallClock:
    """Clock of real time: the monotonic clock, which all processes of a machine share."""

    def now(self) -> float:
        return time.monotonic()


class Device(Protocol):
    """A model on a device, which carries out commands and steps in the order in which they come.

    At most one step is under way: `collect` follows every `submit`. `execute` may be called only
    while no step is under way; commands of `messages.commands.BESIDE_STEPS` may come at any time
    from any thread.

    A caller can be interrupted (Ctrl-C) in any of these methods. The step is then forgotten: its
    result is never returned, and the next `submit` begins another step. `CountCommands` returns how
    many commands were done: a device answers each command once, and counts it then. A command that
    was itself interrupted is not counted, and is sent again.
    """

    @property
    def info(self) -> DeviceInfo:
        """Return the device's description."""
        ...

    @property
    def clock(self) -> Clock:
        """Return the clock by which steps are timed."""
        ...

    def execute(self, command: Command) -> Reply:
        """Carry out a command, and return its reply.

        Raises:
            CoserveError: See each command; nothing has changed.
        """
        ...

    def submit(self, batch: StepBatch) -> None:
        """Begin a step.

        Returns at once where the device works by itself (a GPU, another process); errors are then
        raised by `collect`. If this raises (the caller was interrupted), no step is under way, and
        it is not known which of the batch's new pages the device has: the requests must be closed,
        and opened again.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the step that was submitted, and return its result.

        Running out of memory is a result (`StepFailure`). Any other error is raised, and leaves the
        step's packs and optimizer steps in an unknown state.
        """
        ...

    def close(self) -> None:
        """Free the device, and end its process, if it has one."""
        ...


class CommandCount:
    """Counter of the commands of the ordered stream that a device has answered, by whatever way
    they came; see `CountCommands`.
    """

    def __init__(self) -> None:
        self._num_answered = 0

    def add(self, command: Command) -> None:
        """Count a command that was done, or has failed."""
        if not isinstance(command, _NOT_COUNTED):
            self._num_answered += 1

    def reply(self) -> CommandsCounted:
        """Return the reply to `CountCommands`."""
        return CommandsCounted(self._num_answered)
