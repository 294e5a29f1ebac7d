"""Inverses of commands: a command that fails on one rank of a group is undone on the ranks where it
was done.
"""

from coserve.devices.messages.commands import (
    CloseGrammar,
    CloseRequest,
    Command,
    DropVersion,
    OpenGrammar,
    OpenRequest,
    OpenVersion,
)
from coserve.devices.messages.jobs import (
    BeginPack,
    CloseTrainer,
    DropCheckpoint,
    DropPack,
    DropTrainer,
    OpenTrainer,
    PublishVersion,
    TakeCheckpoint,
)
from coserve.devices.messages.pages import MovePages


def inverses_of(command: Command) -> tuple[Command, ...]:
    """Return the commands that take a command back, in order; none for one that leaves nothing on
    the device.

    The device itself takes back `TakeContribution` and `CombineContributions`, which no command
    could: what they took is the device's alone (`TorchDevice.undo`). `ReadContributions` needs no
    inverse: sent again, it replaces what was read.
    """
    match command:
        case OpenRequest():
            return (CloseRequest(command.request),)
        case OpenGrammar():
            return (CloseGrammar(command.grammar),)
        case OpenVersion():
            return (DropVersion(command.version),)
        case OpenTrainer():
            return CloseTrainer(command.job), DropTrainer(command.job)
        case BeginPack():
            return (DropPack(command.job),)
        case MovePages():  # which are whole still: no row has been written since
            return (MovePages(command.targets, command.pages),)
        case PublishVersion():
            return (DropVersion(command.version),)
        case TakeCheckpoint():
            return (DropCheckpoint(command.checkpoint),)
    return ()
