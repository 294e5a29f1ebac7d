"""The end of an engine: it lets go of its device, which may be processes of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from coserve.devices.base import Device


class DeviceOwner:
    """An owner of a device, which lets go of it when it is closed, or at the end of a `with`
    block.
    """

    device: Device
    """The device that is closed."""

    def close(self) -> None:
        """Let go of the device: end the processes of its ranks, if it has several. The engine
        cannot be used any more.

        May be called again.
        """
        self.device.close()

    def __enter__(self) -> Self:
        """Return the engine, which is closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def closed_on_error(device: Device) -> Iterator[None]:
    """Let go of a device if the block, which gives it an owner, raises an error."""
    try:
        yield
    except BaseException:
        device.close()
        raise
