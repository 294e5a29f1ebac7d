"""The process of a `ProcessDevice`: it does what comes over a socket, and ends when the socket does."""

import logging
import os
import signal
import socket
import sys
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from coserve.devices.cpu_threads import worthwhile_threads
from coserve.devices.loading import open_device
from coserve.devices.messages import BESIDE_STEPS, Command, Reply
from coserve.devices.process_memory import bound_compiled_products, keep_freed_memory
from coserve.devices.settings import DeviceSettings
from coserve.devices.step_messages import StepBatch, StepResult
from coserve.devices.torch_device import TorchDevice
from coserve.devices.wire import Call, Connection, Done, LoadingProgress, Started, ToDevice, raised
from coserve.sandbox.parent_death import end_with_parent

_log = logging.getLogger(__name__)


def main(descriptor: int) -> None:
    """Serve a device until the other end is gone."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the other end decides
    connection = Connection(socket.socket(fileno=descriptor), ToDevice)
    messages: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, messages), daemon=True).start()
    device = _start(messages.get(), connection)
    while device is not None:
        call = messages.get()
        if isinstance(call.command, BESIDE_STEPS):
            Thread(target=_answer, args=(device, call, connection)).start()
        else:
            _answer(device, call, connection)


def _receive(connection: Connection, messages: "SimpleQueue[Any]") -> None:
    """Take messages while the device works; at their end, or at one that cannot be understood, end the process in the
    middle of it.
    """
    try:
        while True:
            messages.put(connection.receive())
    except EOFError:
        os._exit(0)
    except Exception:
        _log.exception("what was sent to the device cannot be understood")
        os._exit(1)


def _start(settings: DeviceSettings, connection: Connection) -> TorchDevice | None:
    try:
        keep_freed_memory()
        bound_compiled_products()
        torch.set_num_threads(settings.threads or worthwhile_threads(settings.model))
        device = open_device(settings, lambda *progress: connection.send(LoadingProgress(*progress)))
    except Exception as error:  # whatever it is, the other end is to know
        connection.send(raised(None, error))
        return None
    connection.send(Started(device.info))
    return device


def _answer(device: TorchDevice, call: Call, connection: Connection) -> None:
    try:
        connection.send(Done(call.call, _do(device, call.command)))
    except Exception as error:  # as in one process: the engine decides what it means
        connection.send(raised(call.call, error))


def _do(device: TorchDevice, command: Command | StepBatch) -> Reply | StepResult:
    if isinstance(command, StepBatch):
        device.submit(command)
        return device.collect()
    return device.execute(command)


if __name__ == "__main__":
    main(int(sys.argv[1]))
