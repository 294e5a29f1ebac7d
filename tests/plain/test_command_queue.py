"""What the device is told, and in which order."""

from coserve.devices.job_messages import DropPack
from coserve.devices.messages import CloseRequest, Command, OpenRequest
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.command_queue import CommandQueue


def opened(request: str) -> OpenRequest:
    return OpenRequest(request=request, params=SamplingParams(), seed=0, pages=(1, 2))


def test_a_request_that_is_closed_before_the_device_heard_of_it_is_not_opened():
    """A pack that has its pages by then is begun at once, before what waits here."""
    commands = CommandQueue()
    sent: list[Command] = [
        CloseRequest("a"),
        opened("a"),
        DropPack("job"),
        opened("b"),
        CloseRequest("a"),
        opened("a"),
        opened("c"),
    ]
    for command in sent:
        commands.send(command)
    assert list(commands) == [sent[0], *sent[2:]]
    commands.send(CloseRequest("c"))
    assert list(commands) == [sent[0], *sent[2:6], CloseRequest("c")]
