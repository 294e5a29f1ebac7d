"""What a device must still do for what has happened already."""

from collections import deque

from coserve.devices.base import Device
from coserve.devices.job_messages import CloseTrainer, DropPack, DropTrainer
from coserve.devices.swap_messages import SwapOutTensors
from coserve.engine.host_swap import HostSwap
from coserve.errors import DeviceGoneError

OwedCommand = DropPack | CloseTrainer | DropTrainer | SwapOutTensors


class OwedCommands:
    """Commands that are owed until the device has done them, in order; again, if the caller was interrupted."""

    def __init__(self, device: Device, swap: HostSwap) -> None:
        self._device, self._swap = device, swap
        self._owed: deque[OwedCommand] = deque()

    def add(self, command: OwedCommand) -> None:
        self._owed.append(command)

    def settle(self) -> None:
        """Have the device do what is owed; one that is gone is owed nothing."""
        try:
            while self._owed:
                if isinstance(self._owed[0], SwapOutTensors):
                    self._swap.flush(self._device)  # the slots may have been those of pages that are still to come back
                self._device.execute(self._owed[0])
                self._owed.popleft()
        except DeviceGoneError:
            self._owed.clear()
            raise
