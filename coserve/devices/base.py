"""What the engine asks of a device. In this process, in another or modelled: the engine does not
ask which it is.
"""

import time
from typing import Protocol

from coserve.devices.messages.commands import Command, DeviceInfo, Reply
from coserve.devices.messages.steps import StepBatch, StepResult


class Clock(Protocol):
    """Seconds since some moment."""

    def now(self) -> float: ...


class WallClock:
    """Seconds of the monotonic clock, which all processes of a machine share."""

    def now(self) -> float:
        return time.monotonic()


class Device(Protocol):
    """A model on a device. Commands and steps are done in the order in which they come.

    At most one step is under way: `collect` comes after every `submit`. `execute` may be called
    only while no step is under way, except for the commands of `messages.BESIDE_STEPS`, which may
    come at any time from any thread.

    A caller can be interrupted (Ctrl-C) in any of these. Then the step is forgotten: its result is
    never handed out, and the next `submit` begins another. How many of the commands were done,
    `CountCommands` says: a device answers each command once, and counts it then. A command that was
    interrupted itself is not counted, and comes again.
    """

    @property
    def info(self) -> DeviceInfo: ...

    @property
    def clock(self) -> Clock: ...

    def execute(self, command: Command) -> Reply:
        """Do a command, and wait for its reply; CoserveError (see each command) changes nothing."""
        ...

    def submit(self, batch: StepBatch) -> None:
        """Begin a step. Returns at once where the device works by itself (a GPU, another process);
        what goes wrong is raised by `collect`. If it does raise (the caller was interrupted), no
        step is under way, and which of the batch's new pages the device has taken in is not known:
        requests must be closed, and opened again.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the step that was submitted. Running out of memory is a result (`StepFailure`);
        other errors are raised, and leave the step's packs and optimizer steps in an unknown state.
        """
        ...

    def close(self) -> None:
        """Let go of the device; the end of its process, if it has one."""
        ...
