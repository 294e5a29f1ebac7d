"""Interface between a sandbox and its code: a task, and the limits of each call."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec


class SandboxTask(ABC):
    """A function on plain data that keeps prepared state.

    A sandbox imports the class by its module and name, makes one instance, and forks a process for
    each call: every call finds the state as `__init__` left it. The module must not import torch,
    since each sandbox imports it anew.
    """

    setup_type: ClassVar[Any]
    """Type of the constructor's argument, for msgspec."""
    call_type: ClassVar[Any]
    """Type of a call, for msgspec."""
    reply_type: ClassVar[Any]
    """Type of a reply, for msgspec."""

    @abstractmethod
    def __init__(self, setup: Any) -> None:
        """Prepare what every call needs. The argument is trusted, and this is not limited."""

    @abstractmethod
    def run(self, call: Any) -> Any:
        """Run one call in a process of its own; an exception is a failure of the sandbox
        ("crashed").
        """


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Bounds of one call."""

    # Bytes that the call may allocate beside what the prepared task has.
    memory_bytes: int = 512 << 20
    # Bytes of the stack of the thread that runs the call.
    stack_bytes: int = 1 << 20
    # Seconds of computing, in whole seconds, which is what the kernel counts them in.
    cpu_s: int = 5
    # Seconds by the clock, for calls that wait or that a busy machine holds up.
    wall_s: float = 30.0


# The first three are due to the call, which would fail so again. The others are due to the machine:
# "late" where it is busy, "killed" as the kernel does without memory, "unstarted" where there are
# no more threads or files.
Failure = Literal["crashed", "memory", "time", "late", "killed", "unstarted"]


class CallExit(msgspec.Struct, frozen=True):
    """Exit of a call's process, as the template reports it."""

    # As of `os.waitstatus_to_exitcode`: the negative number of the signal that ended it.
    status: int
    # The end of its standard error.
    stderr: str
    peak_bytes: int
    """Peak resident memory of the process."""


def task_name(task: type[SandboxTask]) -> str:
    """Return the name by which a sandbox's process imports a task."""
    return f"{task.__module__}:{task.__qualname__}"
