"""Transports of messages between instances: between processes of one machine, or within one.

No call waits: the engine's loop has steps to run, whatever the other end does.
"""

import errno
import os
import socket
import struct
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from coserve.errors import CoserveError
from coserve.handover.messages import decode, encode

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16
_BACKLOG = 16


class Transport(Protocol):
    """One end of a connection. The other end may be gone at any moment: then `send` and `receive`
    raise ConnectionError.
    """

    def send(self, message: Any) -> None:
        """Send a message, or keep it for a later call that can."""
        ...

    def receive(self) -> list[Any]:
        """Return all messages that have arrived."""
        ...

    def close(self) -> None:
        """Close the connection, which the other end notices."""
        ...

    @property
    def waits_on(self) -> int | None:
        """File descriptor that is readable when a message has arrived; None if there is none."""
        ...


class LocalTransport:
    """A transport within a process."""

    waits_on = None

    def __init__(
        self, incoming: "deque[bytes]", outgoing: "deque[bytes]", ends: list[bool]
    ) -> None:
        """Connect two queues of frames; `ends` gets an entry as soon as either end is closed."""
        self._incoming, self._outgoing, self._ends = incoming, outgoing, ends

    def send(self, message: Any) -> None:
        if self._ends:
            raise ConnectionResetError("the other end has closed the connection")
        self._outgoing.append(encode(message))

    def receive(self) -> list[Any]:
        # Frames that arrived before the end are still delivered.
        if not self._incoming and self._ends:
            raise ConnectionResetError("the other end has closed the connection")
        messages = [decode(frame) for frame in self._incoming]
        self._incoming.clear()
        return messages

    def close(self) -> None:
        self._ends.append(True)


def local_pair() -> tuple[LocalTransport, LocalTransport]:
    """Return the two ends of a connection within this process."""
    there, back, ends = deque[bytes](), deque[bytes](), list[bool]()
    return LocalTransport(back, there, ends), LocalTransport(there, back, ends)


class SocketTransport:
    """A transport between processes: length-prefixed frames over a Unix socket, which the kernel
    closes with its process.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self._read, self._unsent = end, bytearray(), bytearray()
        self._has_ended = False

    @property
    def waits_on(self) -> int | None:
        return self._end.fileno()

    def send(self, message: Any) -> None:
        frame = encode(message)
        self._unsent += _LENGTH.pack(len(frame)) + frame
        self._send_on()

    def receive(self) -> list[Any]:
        """Return all messages that have arrived; raise once a closed connection has none left."""
        try:
            # Every call also sends what an earlier `send` could not.
            self._read_on()
            self._send_on()
        except ConnectionError:
            self._has_ended = True
        messages, start = [], 0
        while len(self._read) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._read, start)[0]
            if len(self._read) < end:
                break
            messages.append(_decoded(self._read[start + _LENGTH.size : end]))
            start = end
        del self._read[:start]
        if self._has_ended and not messages:
            raise ConnectionResetError("the other end has closed the connection")
        return messages

    def close(self) -> None:
        self._end.close()

    def _send_on(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]

    def _read_on(self) -> None:
        with suppress(BlockingIOError):
            while True:
                some = self._end.recv(_READ_BYTES)
                if not some:
                    raise ConnectionResetError
                self._read += some


def _decoded(frame: bytearray) -> Any:
    try:
        return decode(frame)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"its message cannot be decoded: {error}") from None


def connect(path: Path) -> SocketTransport:
    """Connect to the instance that listens at a path.

    Raises:
        OSError: There is none.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(str(path))
    except OSError:
        end.close()
        raise
    return SocketTransport(end)


class Listener:
    """A socket at which decode instances find a prefill instance."""

    def __init__(self, path: Path) -> None:
        """Listen at a path.

        Raises:
            CoserveError: It cannot be used, or another instance listens there.
        """
        self._path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
            path.chmod(0o600)
            self._listening.listen(_BACKLOG)
            self._listening.setblocking(False)
        except OSError as error:
            self._listening.close()
            in_use = error.errno == errno.EADDRINUSE
            reason = "another process listens there" if in_use else error.strerror or str(error)
            raise CoserveError(f"--prefill-socket {path} cannot be used: {reason}") from None

    @property
    def waits_on(self) -> int:
        """File descriptor that is readable when an instance connects."""
        return self._listening.fileno()

    def accept(self) -> list[Transport]:
        """Return new connections."""
        transports: list[Transport] = []
        with suppress(BlockingIOError):
            while True:
                transports.append(SocketTransport(self._listening.accept()[0]))
        return transports

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _bind(self) -> None:
        """Bind the path, also where a killed process has left a socket that is of no use."""
        try:
            self._listening.bind(str(self._path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not self._path.is_socket():
                raise
            try:
                # A socket file without a listener refuses connections: it can be replaced.
                connect(self._path).close()
            except ConnectionRefusedError:
                self._path.unlink()
                self._listening.bind(str(self._path))
            else:
                raise
