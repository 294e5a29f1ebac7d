"""Answers to clients: JSON, errors in OpenAI's form, and server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.server.bodies.other_fields import HEADER
from coserve.server.errors import ApiError

_log = logging.getLogger(__name__)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client has closed its connection."""


def to_json(value: Any) -> bytes:
    """Return a value as JSON.

    Text that is not valid Unicode, which only clients can bring, is escaped as they wrote it.
    """
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, ValueError):
        return json.dumps(value).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a complete JSON answer."""
    return Response(
        to_json(value), status_code=status, headers=headers, media_type="application/json"
    )


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names the fields of a body that were passed over."""
    return {HEADER: ", ".join(ignored)} if ignored else {}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the JSON of an error: OpenAI's form, with Anthropic's `type` on paths of Anthropic's
    API.
    """
    return {**({"type": "error"} if _is_anthropics(path) else {}), **error.body()}


def error_response(error: ApiError) -> ASGIApp:
    """Return an ASGI application that answers with an error."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        response = json_response(error_body(error, scope["path"]), error.status, error.headers)
        await response(scope, receive, send)

    return respond


def server_sent_event(value: Any, name: str = "") -> bytes:
    """Return one event of a stream."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(value) + b"\n\n"


def error_event(error: ApiError, path: str) -> bytes:
    """Return the last event of a stream that broke off.

    It has a name on paths of Anthropic's API, whose clients skip events without one.
    """
    return server_sent_event(error_body(error, path), "error" if _is_anthropics(path) else "")


def _is_anthropics(path: str) -> bool:
    return path.startswith("/v1/messages")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine for as long as the client waits.

    Raises:
        ClientGoneError: The client has closed its connection.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Nothing(Response):
    """Empty answer to a client that has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


async def answer(
    request: Request,
    *,
    whole: Coroutine[Any, Any, Any] | None = None,
    events: AsyncGenerator[bytes, None] | None = None,
    ignored: tuple[str, ...] = (),
    end: bytes = DONE,
) -> Response:
    """Return an answer as JSON or as a stream of events; work on it stops when the client leaves.

    A stream is answered once it has its first event, so that an error before that has its own
    status.

    Args:
        request: The request.
        whole: Coroutine that returns the JSON.
        events: Generator of the events of a stream.
        ignored: Fields of the body that were ignored; a header names them.
        end: Last bytes of a stream.
    """
    headers = ignored_header(ignored)
    try:
        if events is not None:
            first = await until_disconnect(request.receive, _first(events))
            return EventStream(first, events, headers, end)
        assert whole is not None
        return json_response(await until_disconnect(request.receive, whole), headers=headers)
    except ClientGoneError:
        if events is not None:
            await events.aclose()
        return _Nothing()


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events, b"")


class EventStream(Response):
    """Answer of server-sent events, whose generator is closed as soon as the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str], end: bytes
    ) -> None:
        super().__init__(
            # nginx would otherwise collect events before it passes them on.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        # `Response` has set it for an empty body.
        del self.headers["content-length"]
        self._first, self._events, self._end = first, events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with suppress(ClientGoneError, OSError):
            await until_disconnect(receive, self._send_all(scope["path"], send))

    async def _send_all(self, path: str, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = self._end
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                last = error_event(error, path)
            except Exception:
                _log.exception("a stream failed")
                last = error_event(
                    ApiError("the server had an error", status=500, kind="server_error"), path
                )
            await send({"type": "http.response.body", "body": last, "more_body": False})
