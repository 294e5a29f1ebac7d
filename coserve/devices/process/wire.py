"""What a device's process and the engine's say to each other: msgpack frames, each after its
length.
"""

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
    """Do a command, or run a step; answered by `Done` or `Raised` with the same number."""

    call: int
    command: Command | StepBatch


class Done(msgspec.Struct, tag=True, frozen=True):
    """A command is done, or a step has run."""

    call: int
    reply: Reply | StepResult


class Raised(msgspec.Struct, tag=True, frozen=True):
    """A command or a step (None: the start) raised an error of a kind, the name of its class."""

    call: int | None
    kind: str
    message: str

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
    """What the start is at."""

    stage: str
    done: int
    total: int


class KernelsPrepared(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 has compiled the kernels, or found them: from now on other ranks find them, too."""


class Started(msgspec.Struct, tag=True, frozen=True):
    """The device takes commands."""

    info: DeviceInfo


ToDevice = DeviceSettings | Call
FromDevice = LoadingProgress | KernelsPrepared | Started | Done | Raised

_encode = msgspec.msgpack.Encoder().encode


def framed(message: Any) -> bytes:
    """Encode a message as the frame that a connection sends: one encoding does for several of
    them.
    """
    encoded = _encode(message)
    return LENGTH.pack(len(encoded)) + encoded


class Connection:
    """One end of a socket pair. `send` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        """receives: the union of what the other end sends."""
        self._end, self._sending = end, Lock()
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: Any) -> None:
        """Send a message; OSError if the other end is gone, see `send_frame`."""
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what `framed` has encoded; OSError if the other end is gone.

        A call that is interrupted closes the connection: a part of the frame may have been sent,
        and what came after could not be told from the rest of it.
        """
        with self._sending:
            try:
                self._end.sendall(frame)
            except OSError:
                raise
            except BaseException:
                self.close()
                raise

    def receive(self) -> Any:
        """The next message; EOFError if the other end is gone, msgspec.DecodeError if what it sends
        is no message.
        """
        try:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
            return self._decoder.decode(self._exactly(length))
        except OSError as error:
            raise EOFError from error

    def close(self) -> None:
        """The other end sees that nothing more comes."""
        with suppress(OSError):  # it has gone already
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        room = memoryview(found)
        while room:
            number = self._end.recv_into(room)
            if not number:
                raise EOFError
            room = room[number:]
        return found


def raised(call: int | None, error: BaseException) -> Raised:
    """An error as a message; kinds of OSError are one, except that a full disk can be told from the
    others.
    """
    kind = type(error).__name__
    if isinstance(error, OSError):
        kind = "DiskFullError" if is_disk_full(error) else "OSError"
    return Raised(call, kind, " ".join(str(error).split()) or kind)
