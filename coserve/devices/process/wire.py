"""Wire between a device's process and the engine's: msgpack frames, each after its length."""

import socket
import struct
from contextlib import suppress
from threading import Lock
from typing import Any

import msgspec

from coserve.devices.messages.commands import Command, DeviceInfo, Reply
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.settings import DeviceSettings
from coserve.errors import error_of_kind
from coserve.home import is_disk_full

LENGTH = struct.Struct("<Q")


class Call(msgspec.Struct, tag=True, frozen=True):
    """Call to carry out a command, or to run a step; answered by `Done` or `Raised` with the same
    number.
    """

    call: int
    """Number of the call."""
    command: Command | StepBatch
    """The command or the step."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """Answer to a call that was carried out."""

    call: int
    """Number of the call."""
    reply: Reply | StepResult
    """The command's reply, or the step's result."""


class Raised(msgspec.Struct, tag=True, frozen=True):
    """Answer to a call, or to the start, that has raised an error."""

    call: int | None
    """Number of the call; None: the start."""
    kind: str
    """Name of the error's class."""
    message: str
    """The error's message."""

    def error(self) -> Exception:
        """Return the error: one of coserve's own or of the system's as it was, anything else as
        RuntimeError.
        """
        own = error_of_kind(self.kind)
        if own is not None:
            return own(self.message)
        return (
            OSError(self.message)
            if self.kind == "OSError"
            else RuntimeError(f"{self.kind}: {self.message}")
        )


class LoadingProgress(msgspec.Struct, tag=True, frozen=True):
    """Progress of the start."""

    stage: str
    """Name of its stage."""
    done: int
    """How much of the stage is done."""
    total: int
    """How much there is to do."""


class KernelsPrepared(msgspec.Struct, tag=True, frozen=True):
    """Message that rank 0 has compiled the kernels, or found them: from then on other ranks find
    them, too.
    """


class Started(msgspec.Struct, tag=True, frozen=True):
    """Message that the device takes commands."""

    info: DeviceInfo
    """The device's description."""


ToDevice = DeviceSettings | Call
FromDevice = LoadingProgress | KernelsPrepared | Started | Done | Raised

_encode = msgspec.msgpack.Encoder().encode


def framed(message: Any) -> bytes:
    """Encode a message as the frame that a connection sends, once for several connections."""
    encoded = _encode(message)
    return LENGTH.pack(len(encoded)) + encoded


class Connection:
    """One end of a socket pair. `send` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        """Use an end of a socket pair.

        Args:
            end: The socket.
            receives: Union of the messages that the other end sends.
        """
        self._end, self._sending = end, Lock()
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: Any) -> None:
        """Send a message; see `send_frame`.

        Raises:
            OSError: The other end is gone.
        """
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that `framed` has encoded.

        A call that is interrupted closes the connection: a part of the frame may have been sent,
        and what came after could not be told from the rest of it.

        Raises:
            OSError: The other end is gone.
        """
        with self._sending:
            try:
                self._end.sendall(frame)
            except OSError:  # the other end is gone: there is no stream left to keep in order
                raise
            except BaseException:
                self.close()
                raise

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            EOFError: The other end is gone.
            msgspec.DecodeError: What it sends is no message.
        """
        try:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
            return self._decoder.decode(self._exactly(length))
        except OSError as error:
            raise EOFError from error

    def close(self) -> None:
        """Close this end; the other end gets an end of file."""
        with suppress(OSError):  # it has gone already
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        room = memoryview(data)
        # A stream socket gives what is there, often less than was asked for.
        while room:
            number = self._end.recv_into(room)
            if not number:
                raise EOFError
            room = room[number:]
        return data


def raised(call: int | None, error: BaseException) -> Raised:
    """Return an error as a message.

    Kinds of OSError become one, but a full disk can be told from the others.
    """
    kind = type(error).__name__
    if isinstance(error, OSError):
        kind = "DiskFullError" if is_disk_full(error) else "OSError"
    return Raised(call, kind, " ".join(str(error).split()) or kind)
