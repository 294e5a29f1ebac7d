"""Limits on the number of connections, and on how long a client may keep one waiting.

Uvicorn's own limits count idle and busy connections alike and refuse probes too, and its timeouts
begin with the first answer. Here the connection that has been idle longest makes room for a new
one, as in nginx, so that clients that hold unused connections lock nobody out.
"""

import asyncio
import json
import logging
import os
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coserve.server.errors import ApiError
from coserve.server.http.request_log import RequestLogMiddleware
from coserve.server.http.responses import error_response

if TYPE_CHECKING:
    from uvicorn import Config

_log = logging.getLogger(__name__)

# Beyond the limit, where all are busy: for probes, and to tell others so.
NUM_RESERVED = 32
# Connections that are accepted before the event loop looks at any of them.
ACCEPT_AT_ONCE = 64
# Open files for the store, the engine, and connections that are being accepted.
_OTHER_FILES = 64 + ACCEPT_AT_ONCE + NUM_RESERVED
_MIN_CONNECTIONS = 16
# After this, a client that reads nothing of what is sent to it is dropped.
_WRITE_STALL_S = 60.0
_TOO_MANY = "The server has no free connection: all are busy; try again in a second."
_PROBES = ("/health", "/ready")
# What was sent last may still be on its way when a connection is closed.
_LINGER_S = 5.0
# The rest of a body whose request has been answered is read up to this size, so that the
# connection can be used again. Of a longer one no more is read, and the client has a moment to read
# its answer.
_MAX_UNWANTED_BYTES = 1 << 20
_UNWANTED_LINGER_S = 1.0


@dataclass(kw_only=True)
class Connections:
    """Open connections of the server."""

    most: int
    """Number of connections above which the longest idle one is closed."""
    timeout_headers_s: float
    """Time from the first byte of a connection or a request to the end of the headers."""
    all: "set[HttpProtocol]" = field(default_factory=set)
    """All open connections."""
    idle: "dict[HttpProtocol, None]" = field(default_factory=dict)
    """Connections that wait for their clients, the longest idle first."""

    @property
    def are_too_many(self) -> bool:
        """Return whether there are more connections than `most`."""
        return len(self.all) > self.most

    def end_idlest(self, newest: "HttpProtocol") -> None:
        """Close the connection that has been idle longest, if there is one."""
        idlest = next(
            (each for each in self.idle if each is not newest and each.awaits_client), None
        )
        if idlest is not None:
            idlest.drop()


def most_connections(wanted: int) -> int:
    """Return the number of connections that are possible, at most `wanted`.

    It raises the limit on open files as far as the system allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS grants fewer than its limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    possible = max(_MIN_CONNECTIONS, files - len(os.listdir("/dev/fd")) - _OTHER_FILES)
    if possible < wanted:
        _log.warning(
            "the limit on connections is %d instead of %d: the process may have only %d open files",
            possible,
            wanted,
            files,
        )
    return min(wanted, possible)


def protocol_of(connections: Connections) -> "type[asyncio.Protocol]":
    """Return the protocol class that uvicorn creates for each connection."""

    # Uvicorn creates the protocol itself: a class of its own carries the connections.
    class Counted(HttpProtocol):
        known = connections

    return Counted


def _probes_of(app: ASGIApp) -> ASGIApp:
    """Return an application for connections beyond the limit, which answers only probes."""
    refusal = ApiError(
        _TOO_MANY,
        status=503,
        kind="server_error",
        code="overloaded",
        headers={"Retry-After": "1", "Connection": "close"},
    )

    refuse = RequestLogMiddleware(error_response(refusal))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] in _PROBES else refuse)(scope, receive, send)

    return answer


class _GentleTransport:
    """Transport of a connection whose `close` lets the last answer arrive.

    It does so even while the client is still sending a body.
    """

    def __init__(self, inner: asyncio.Transport, protocol: "HttpProtocol") -> None:
        self.inner, self._protocol = inner, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def is_closing(self) -> bool:
        """Return whether nothing more is read as a request, or written."""
        return self._protocol.is_ending or self.inner.is_closing()

    def close(self) -> None:
        """End the connection once what was written has arrived."""
        if self._protocol.is_unwanted:
            self._protocol.end_gently()
        else:
            self.inner.close()


def _is_long(scope: Scope) -> bool:
    """Return whether the body of a request may be longer than what is read of an unwanted one."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) > _MAX_UNWANTED_BYTES
        if name == b"transfer-encoding":
            return True
    return False


class HttpProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, with limits."""

    known: Connections
    """All connections of the server."""

    def __init__(self, config: "Config", *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.app = self._announcing_ends(self.app)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_ending = False
        self._num_unwanted_bytes = 0

    def _announcing_ends(self, app: ASGIApp) -> ASGIApp:
        """Return the application, with `Connection: close` in answers to long bodies that are not
        read.

        Otherwise the client would send its next request on this connection.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_closing(message: Message) -> None:
                if (
                    message["type"] == "http.response.start"
                    and self.conn.their_state is h11.SEND_BODY
                ):
                    message = {
                        **message,
                        "headers": [*message.get("headers", ()), (b"connection", b"close")],
                    }
                await send(message)

            await app(
                scope,
                receive,
                send_closing if scope["type"] == "http" and _is_long(scope) else send,
            )

        return answer

    # -- state and commands -------------------------------------------------------------

    @property
    def awaits_client(self) -> bool:
        """Return whether everything received has been answered, so that a vanished client would go
        unnoticed.
        """
        return self.transport.get_write_buffer_size() == 0 and (
            self._awaits_headers or self.cycle.more_body
        )

    def drop(self) -> None:
        """Close the connection at once."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self.known.all.discard(self)
        self.known.idle.pop(self, None)

    @property
    def is_ending(self) -> bool:
        """Return whether all further input is discarded."""
        return self._is_ending

    @property
    def is_unwanted(self) -> bool:
        """Return whether input belongs to a request that was answered, or that never will be."""
        return self._is_ending or (
            self.cycle is not None
            and self.cycle.response_complete
            and self.conn.their_state is h11.SEND_BODY
        )

    @property
    def _awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # -- events of the transport ---------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_GentleTransport(transport, self))  # type: ignore[arg-type]
        self.known.all.add(self)
        self._note()
        self._after("headers", self.known.timeout_headers_s, self._headers_are_late)
        if self.known.are_too_many:
            self.known.end_idlest(self)
        # Even the places that are reserved for probes are taken.
        if len(self.known.all) > self.known.most + NUM_RESERVED:
            self._answer(503, _TOO_MANY)
        elif self.known.are_too_many:
            self.app = _probes_of(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        for name in list(self._timers):
            self._cancel(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_unwanted:
            self._num_unwanted_bytes += len(data)
            if self._num_unwanted_bytes > _MAX_UNWANTED_BYTES:
                self._stop_reading()
        if self._is_ending:
            return
        super().data_received(data)
        self._note()
        if not self._awaits_headers:
            self._cancel("headers")
        elif "headers" not in self._timers:
            self._after("headers", self.known.timeout_headers_s, self._headers_are_late)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._after("write", _WRITE_STALL_S, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("write")

    # -- events of uvicorn ----------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._num_unwanted_bytes = 0
        super().on_response_complete()
        self._note()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._after("linger", _LINGER_S, self.drop)

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request in OpenAI's form, where uvicorn sends plain text."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._answer(400, "The request is not valid HTTP, or its headers are too long.")
        else:
            self._close()

    def _note(self) -> None:
        """Mark the connection as the most recently idle one, or as busy."""
        # Removed and added again, so that the dict stays in the order of idle times.
        self.known.idle.pop(self, None)
        if self in self.known.all and (self._awaits_headers or self.cycle.more_body):
            self.known.idle[self] = None

    # -- timers -----------------------------------------------------------------------------

    def _after(self, name: str, seconds: float, act: Any) -> None:
        self._cancel(name)
        self._timers[name] = self.loop.call_later(seconds, act)

    def _cancel(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _headers_are_late(self) -> None:
        # Bytes of a request whose headers h11 has not read to their end.
        has_begun = bool(self.conn.trailing_data[0])
        if has_begun and self.conn.their_state is h11.IDLE:
            self._answer(
                408,
                f"The request's headers did not arrive within {self.known.timeout_headers_s:g} s.",
            )
        else:
            self._close()

    def _answer(self, status: int, message: str) -> None:
        """Send a last answer that belongs to no request, and close the connection."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = json.dumps(
            {"error": {"message": message, "type": kind, "param": None, "code": None}}
        )
        retry = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: "
            f"{len(body)}\r\n"
            f"{retry}connection: close\r\n\r\n{body}".encode()
        )
        self._close()

    def _stop_reading(self) -> None:
        """Close the connection of a client that has its answer and keeps sending.

        The answer arrives before the end does; further input stays in the system's buffers, which
        soon are full.
        """
        if not self._inner.is_closing():
            self._inner.pause_reading()
        self.end_gently()

    def end_gently(self) -> None:
        """Discard further input for a moment, in which the client can read its answer."""
        if not self._inner.is_closing() and self._inner.can_write_eof() and not self._is_ending:
            self._inner.write_eof()
        self._unset_keepalive_if_required()
        self._is_ending = True
        self._after("linger", _UNWANTED_LINGER_S, self.drop)

    @property
    def _inner(self) -> asyncio.Transport:
        assert isinstance(self.transport, _GentleTransport)
        return self.transport.inner

    def _close(self) -> None:
        """Close the connection after its last answer.

        The answer arrives only if what the client still sends is read, and not refused by the
        system.
        """
        # TLS cannot end one direction alone.
        if self._awaits_headers and self.transport.can_write_eof():
            self._is_ending = True
            self.transport.write_eof()
        else:
            self.transport.close()
        self._after("linger", _LINGER_S, self.drop)
