"""What the device is to be told with the next step."""

from collections import deque

from coserve.devices.messages import CloseRequest, Command, OpenRequest


class CommandQueue(deque[Command]):
    """Commands in their order."""

    def send(self, command: Command) -> None:
        """One more. A request that is closed before the device has heard that it was opened is not opened at all: its
        pages may have gone to a pack by now, whose command overtakes these.
        """
        if isinstance(command, CloseRequest):
            for other in [each for each in self if isinstance(each, OpenRequest) and each.request == command.request]:
                self.remove(other)
        self.append(command)

    def take_all(self) -> list[Command]:
        """All of them; none is left."""
        commands = list(self)
        self.clear()
        return commands
