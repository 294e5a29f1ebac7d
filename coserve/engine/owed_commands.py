"""What a device must still do for what has happened to jobs."""

from collections import deque

from coserve.devices.base import Device
from coserve.devices.messages import CloseTrainer, DropPack, DropTrainer
from coserve.errors import DeviceGoneError

OwedCommand = DropPack | CloseTrainer | DropTrainer


class OwedCommands:
    """Commands that are owed until the device has done them, in order; again, if the caller was interrupted."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._owed: deque[OwedCommand] = deque()

    def add(self, command: OwedCommand) -> None:
        self._owed.append(command)

    def settle(self) -> None:
        """Have the device do what is owed; one that is gone is owed nothing."""
        try:
            while self._owed:
                self._device.execute(self._owed[0])
                self._owed.popleft()
        except DeviceGoneError:
            self._owed.clear()
            raise
