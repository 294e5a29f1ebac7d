"""Processes of ranks that fail when a file tells them to."""

import json
import os
import signal
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from forked_ranks import forking

from coserve.devices.process.child import StartProcess


class RankFault(msgspec.Struct, frozen=True, kw_only=True):
    """What is to happen on a rank, once."""

    what: Literal[
        "dies",
        "stands still",
        "has no memory",
        "is broken",
        "cannot read",
        "cannot write",
        "is late",
    ]
    where: Literal["step", "command"]
    kinds: tuple[str, ...] = ()
    """Names of the commands that it may hit; none for a step."""
    num_calls: int = 1
    """Calls of PyTorch within the step until then; of a command, more than 1 where it happens after
    that was done."""
    late_s: float = 0.0

    @property
    def is_error(self) -> bool:
        """Return whether it is raised: then it has changed nothing, as every error of a command."""
        return self.what not in ("dies", "stands still", "is late")

    def happen(self) -> None:
        """Have it happen in this process."""
        match self.what:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stands still":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "is late":
                time.sleep(self.late_s)
            case _:
                raise self._error()

    def _error(self) -> Exception:
        import torch

        from coserve.errors import AdapterError

        match self.what:
            case "has no memory":
                return torch.OutOfMemoryError("the storm has taken a rank's memory")
            case "cannot read":
                return AdapterError("the storm has taken a rank's files")
            case "cannot write":
                return OSError(28, "No space left on device, says the storm")
        return KeyError("the storm has broken a rank")


class Instructions:
    """Files in a directory: by the first, a rank is told what is to happen; by the other, it tells
    what it holds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def give(self, rank: int, fault: RankFault) -> None:
        """Tell a rank what is to happen, instead of what it was told before."""
        new = self._directory / "new"
        new.write_bytes(msgspec.json.encode(fault))
        new.rename(self._given(rank))

    def revoke(self) -> None:
        """Take back what no rank has come to yet."""
        for each in self._directory.glob("fault-*"):
            each.unlink(missing_ok=True)

    def take(self, rank: int, where: str, kind: str = "") -> RankFault | None:
        """Return what is to happen now, which does so once."""
        try:
            fault = msgspec.json.decode(self._given(rank).read_bytes(), type=RankFault)
        except FileNotFoundError:
            return None
        if fault.where != where or (kind and kind not in fault.kinds):
            return None
        with suppress(FileNotFoundError):
            self._given(rank).unlink()
            (self._directory / "happened").open("a").write(f"{fault.what} in a {where}\n")
        return fault

    def happened(self) -> list[str]:
        """Return what has happened so far, each fault once."""
        file = self._directory / "happened"
        return file.read_text().splitlines() if file.exists() else []

    def tell(self, rank: int, held: dict[str, list[str]]) -> None:
        (self._directory / f"held-{rank}").write_text(json.dumps(held))

    def held(self, rank: int) -> dict[str, list[str]]:
        """Return what a rank held when it was last asked to describe itself."""
        found: dict[str, list[str]] = json.loads((self._directory / f"held-{rank}").read_text())
        return found

    def _given(self, rank: int) -> Path:
        return self._directory / f"fault-{rank}"


def starter(directory: Path) -> StartProcess:
    """Return what starts ranks that follow the instructions in a directory."""
    return forking(partial(_install, Instructions(directory)))


def _install(instructions: Instructions, rank: int) -> None:
    """Have this process's device fail as it is told to."""
    from coserve.devices.messages.commands import DescribeRanks
    from coserve.devices.torch.device import TorchDevice
    from coserve.devices.torch.step import TorchStep

    execute, launch = TorchDevice.execute, TorchStep.launch

    def failing_execute(self: TorchDevice, command: Any) -> Any:
        if isinstance(command, DescribeRanks):
            instructions.tell(rank, _held(self))
            return execute(self, command)
        fault = instructions.take(rank, "command", type(command).__name__)
        if fault is None:
            return execute(self, command)
        if fault.is_error:
            self._count.add(command)
            with _memory_errors():
                fault.happen()
        if fault.num_calls == 1:
            fault.happen()
            return execute(self, command)
        reply = execute(self, command)
        fault.happen()
        return reply

    def failing_launch(self: TorchStep) -> None:
        fault = instructions.take(rank, "step")
        with nullcontext() if fault is None else _happening_after(fault):
            launch(self)

    TorchDevice.execute, TorchStep.launch = failing_execute, failing_launch  # type: ignore[method-assign]


def _memory_errors() -> Any:
    from coserve.devices.torch.process_memory import memory_errors

    return memory_errors()


def _happening_after(fault: RankFault) -> Any:
    """Return a context in which a fault happens after some calls of PyTorch."""
    from torch.overrides import TorchFunctionMode

    class Happening(TorchFunctionMode):
        num_left = fault.num_calls

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.num_left -= 1
            if self.num_left == 0:
                fault.happen()
            return func(*args, **(kwargs or {}))

    return Happening()


def _held(device: Any) -> dict[str, list[str]]:
    """Return the names of what a device holds."""
    return {
        "versions": sorted(device._versions),
        "trainers": sorted(device._trainers),
        "copies": sorted(device._checkpoints),
        "requests": sorted(device._requests._handles),
    }
