"""Count of the commands that a device has answered, which an interrupted engine reads before it
replays its log.
"""

from coserve.devices.messages.commands import BESIDE_STEPS, Command, CommandsCounted, CountCommands

_NOT_COUNTED = (*BESIDE_STEPS, CountCommands)


class CommandCount:
    """Counter of the commands of the ordered stream, by whatever way they came; see
    `CountCommands`.
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
