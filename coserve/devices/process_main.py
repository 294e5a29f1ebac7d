"""The process of a `ProcessDevice`: it does what comes over a socket, and ends when the socket does."""

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
from coserve.devices.messages import LoadAdapter, StepBatch, WriteCheckpoint
from coserve.devices.process_memory import bound_compiled_products, keep_freed_memory
from coserve.devices.settings import DeviceSettings
from coserve.devices.torch_device import TorchDevice
from coserve.devices.wire import Call, Connection, Done, LoadingProgress, Started, ToDevice, raised


def main(descriptor: int) -> None:
    """Serve a device until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the other end decides
    connection = Connection(socket.socket(fileno=descriptor), ToDevice)
    messages: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, messages), daemon=True).start()
    device = _start(messages.get(), connection)
    while device is not None:
        message = messages.get()
        if isinstance(message, StepBatch):
            _step(device, message, connection)
        elif isinstance(message.command, LoadAdapter | WriteCheckpoint):  # beside steps
            Thread(target=_execute, args=(device, message, connection)).start()
        else:
            _execute(device, message, connection)


def _receive(connection: Connection, messages: "SimpleQueue[Any]") -> None:
    """Take messages while the device works; at their end, end the process in the middle of it."""
    try:
        while True:
            messages.put(connection.receive())
    except EOFError:
        os._exit(0)


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


def _step(device: TorchDevice, batch: StepBatch, connection: Connection) -> None:
    try:
        device.submit(batch)
        connection.send(device.collect())
    except Exception as error:  # as in one process: the engine decides what it means
        connection.send(raised(None, error))


def _execute(device: TorchDevice, call: Call, connection: Connection) -> None:
    try:
        connection.send(Done(call.call, device.execute(call.command)))
    except Exception as error:
        connection.send(raised(call.call, error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
