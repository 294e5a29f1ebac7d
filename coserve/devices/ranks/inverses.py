"""What takes a command back: a command that fails on one rank of a group is undone on those ranks
where it was done.
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

    The device itself takes `TakeContribution` back, since no command could give the gradients back
    that it took. `ReadContributions` need not be: sent again, it replaces what was read. Nor is
    `CombineContributions`: sent again, it does what is missing; where that needs collectives on
    some ranks alone, the group ends, and the engine starts anew.
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
