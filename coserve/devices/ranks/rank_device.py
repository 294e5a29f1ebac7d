"""Device of a rank: every command and every step of the ordered stream ends alike on all ranks of
the group.

After each of them the ranks meet once (some microseconds). So a rank that has done its part learns
whether all have, before anything is answered: where one failed, the command is undone on the
others, and the step fails on all.
"""

from msgspec.structs import replace

from coserve.devices.messages.commands import Command, DeviceInfo, Reply
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.torch.device import TorchDevice
from coserve.errors import RankError, RankGoneError
from coserve.kernels.groups.base import RankGroup


class RankDevice:
    """A device with its place in a group, which may be a group of one.

    One thread calls all methods but `execute_beside`.
    """

    def __init__(self, device: TorchDevice, group: RankGroup) -> None:
        self._device, self._group = device, group

    @property
    def info(self) -> DeviceInfo:
        """Return the device's description."""
        return self._device.info

    @property
    def answers_for_all(self) -> bool:
        """Return whether this is the rank whose reply is that of the group, once all have met."""
        return self._group.rank == 0

    def execute_beside(self, command: Command) -> Reply:
        """Carry out a command of `BESIDE_STEPS_OF_RANKS`, from any thread; it may fail here and be
        done on others.
        """
        return self._device.execute(command)

    def execute(self, command: Command) -> Reply:
        """Carry out a command on all ranks, or on none.

        Raises:
            RankGoneError: The group is over.
            RankError: Another rank has failed, and the command was undone here.
            CoserveError: See each command.
        """
        try:
            reply = self._device.execute(command)
        except Exception as error:
            self._end_call(error)
            raise
        try:
            # Nobody answers before all have done it: a failure elsewhere raises RankError here.
            self._group.barrier()
        except RankGoneError:
            raise
        except RankError as error:
            self._undo(command)
            self._end_call(error)
            raise
        return reply

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step; if it fails on one rank, the device fails it on all.

        Raises:
            RankGoneError: The group is over.
            Exception: As `Device.collect`.
        """
        # Each on all ranks or on none, so that they stay alike even if one of them fails.
        for command in batch.commands:
            self.execute(command)
        # The commands are done by now, one meeting each.
        self._device.submit(replace(batch, commands=()) if batch.commands else batch)
        return self._device.collect()

    def _undo(self, command: Command) -> None:
        """Take a command back.

        Raises:
            RankGoneError: That failed, so that ranks would differ from then on.
        """
        try:
            self._device.undo(command)
        except Exception as error:
            what = f"rank {self._group.rank} cannot take back {type(command).__name__}: {error}"
            raise RankGoneError(what) from error

    def _end_call(self, error: Exception) -> None:
        """Have a call that has failed here fail on all ranks, and the group ready for the next."""
        if isinstance(error, RankGoneError):
            return
        self._group.fail(
            f"{type(error).__name__}: {error}"
        )  # of no effect if another rank has failed first
        self._group.reset()
