"""A process with a device, or one rank of it: it carries out what comes over a socket, and ends
when the socket does.

    python -m coserve.devices.process.main SOCKET [TRANSPORT PLACE RANK SIZE]

SOCKET is a file descriptor that it inherits. TRANSPORT and PLACE: see
`coserve.devices.ranks.seats`.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from msgspec.structs import replace

from coserve.devices.loading import open_device, prepare_kernels
from coserve.devices.messages.commands import (
    BESIDE_STEPS,
    BESIDE_STEPS_OF_RANKS,
    Command,
    DescribeRanks,
    Reply,
)
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.process.cpu_threads import bind_to_share, worthwhile_threads
from coserve.devices.process.wire import (
    Call,
    Connection,
    Done,
    KernelsPrepared,
    LoadingProgress,
    Started,
    ToDevice,
    raised,
)
from coserve.devices.ranks.rank_device import RankDevice
from coserve.devices.ranks.seats import Seat, device_of_rank, seat_of
from coserve.devices.settings import DeviceSettings
from coserve.devices.torch.process_memory import (
    bound_compiled_products,
    give_back_freed_memory,
    keep_freed_memory,
)
from coserve.errors import RankGoneError
from coserve.kernels.groups.base import RankGroup, SingleRank
from coserve.sandbox.parent_death import end_with_parent

_log = logging.getLogger(__name__)

# After which time without work a process gives back the memory that it has kept.
_REST_S = 1.0


def main(descriptor: int, seat: Seat | None = None) -> None:
    """Serve a device until the other end is gone."""
    end_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to all; the other end decides
    if seat is not None and seat.has_own_cores:
        bind_to_share(seat.rank, seat.size)
    connection = Connection(socket.socket(fileno=descriptor), ToDevice)
    messages, beside = SimpleQueue[Any](), SimpleQueue[Call]()
    kinds = BESIDE_STEPS if seat is None or seat.size == 1 else BESIDE_STEPS_OF_RANKS
    # A thread of its own, so that the end of the socket is noticed in the middle of a step.
    Thread(target=_receive, args=(connection, messages, beside, kinds), daemon=True).start()
    device = _start(messages.get(), connection, seat)
    if device is None:
        return
    Thread(target=_answer_all_beside, args=(device, beside, connection), daemon=True).start()
    rests = False
    while True:
        try:
            call = messages.get(timeout=None if rests else _REST_S)
        except Empty:
            give_back_freed_memory()
            rests = True
            continue
        # Describing is no work: after it a process at rest has no memory to give back again.
        rests = rests and isinstance(call.command, DescribeRanks)
        _answer(device, call, connection)


def _receive(
    connection: Connection,
    messages: "SimpleQueue[Any]",
    beside: "SimpleQueue[Call]",
    kinds: tuple[type, ...],
) -> None:
    """Receive messages while the device works; at their end, or at one that cannot be decoded, end
    the process in the middle of it.

    Args:
        connection: Connection to the process that gives the commands.
        messages: Gets messages that are carried out one after the other.
        beside: Gets calls that are carried out beside steps.
        kinds: Commands of the latter.
    """
    try:
        while True:
            message = connection.receive()
            is_beside = isinstance(message, Call) and isinstance(message.command, kinds)
            (beside if is_beside else messages).put(message)
    except EOFError:
        # Not sys.exit, which would end this thread alone and leave the device computing.
        os._exit(0)
    except Exception:
        _log.exception("what was sent to the device cannot be understood")
        os._exit(1)


def _start(
    settings: DeviceSettings, connection: Connection, seat: Seat | None
) -> RankDevice | None:
    def progress(stage: str, done: int, total: int) -> None:
        connection.send(LoadingProgress(stage, done, total))

    try:
        # Settings of the allocator and of oneDNN, before either is used.
        keep_freed_memory()
        bound_compiled_products()
        threads = settings.threads or worthwhile_threads(settings.model, settings.num_ranks)
        torch.set_num_threads(threads)
        group: RankGroup = SingleRank()
        if seat is not None:
            device = device_of_rank(settings.device, seat.rank)
            settings = replace(settings, device=str(device))
            if seat.rank == 0:
                prepare_kernels(device, progress)
                connection.send(KernelsPrepared())
            group = seat.join(device)
        opened = open_device(settings, progress, group=group)
        # All ranks have loaded the model; from here on the limit for waiting is that of steps.
        group.barrier()
        group.limit_waits(settings.rank_timeout_s)
    except Exception as error:  # whatever it is, the other end is to know
        if seat is not None:
            seat.end(f"rank {seat.rank} could not start: {error}")
        connection.send(raised(None, error))
        return None
    connection.send(Started(opened.info))
    return RankDevice(opened, group)


def _answer(device: RankDevice, call: Call, connection: Connection) -> None:
    """Carry out a call of the ordered stream.

    Once it is done on all ranks, one of them answers; each rank answers a call that has failed.
    """
    try:
        reply = _do(device, call.command)
    except RankGoneError as error:
        _log.error("the group of ranks ends: %s", error)
        connection.send(raised(call.call, error))
        # The others end, too: nothing can be agreed on any more.
        os._exit(1)
    except Exception as error:  # as in one process: the engine decides what it means
        connection.send(raised(call.call, error))
        return
    has_failed = isinstance(reply, StepResult) and reply.failure is not None
    if device.answers_for_all or has_failed:
        connection.send(Done(call.call, reply))


def _answer_all_beside(
    device: RankDevice, calls: "SimpleQueue[Call]", connection: Connection
) -> None:
    """Answer calls that need no turn among the others, each in a thread of its own."""
    while True:
        Thread(target=_answer_beside, args=(device, calls.get(), connection)).start()


def _answer_beside(device: RankDevice, call: Call, connection: Connection) -> None:
    assert not isinstance(call.command, StepBatch)
    try:
        connection.send(Done(call.call, device.execute_beside(call.command)))
    except Exception as error:
        connection.send(raised(call.call, error))


def _do(device: RankDevice, command: Command | StepBatch) -> Reply | StepResult:
    return device.run(command) if isinstance(command, StepBatch) else device.execute(command)


def run(arguments: Sequence[str]) -> None:
    """Serve a device, or a rank of one, as the arguments say."""
    descriptor, *seat = arguments
    main(int(descriptor), seat_of(*seat) if seat else None)


if __name__ == "__main__":
    run(sys.argv[1:])
