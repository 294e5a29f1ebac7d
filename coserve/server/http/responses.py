"""What goes back to clients: JSON, errors in OpenAI's form, and server-sent events."""

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
    """As JSON; text that is no Unicode (which only clients can bring) is escaped as they wrote
    it.
    """
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, ValueError):
        return json.dumps(value).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A whole answer."""
    return Response(
        to_json(value), status_code=status, headers=headers, media_type="application/json"
    )


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names the fields of a body that were passed over."""
    return {HEADER: ", ".join(ignored)} if ignored else {}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """An error as OpenAI gives it, which with a type of its own is Anthropic's, for who asks at
    that path.
    """
    return {**({"type": "error"} if _is_anthropics(path) else {}), **error.body()}


def error_response(error: ApiError) -> ASGIApp:
    """What answers with an error, in the form of the API that was asked."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        made = json_response(error_body(error, scope["path"]), error.status, error.headers)
        await made(scope, receive, send)

    return respond


def server_sent_event(value: Any, name: str = "") -> bytes:
    """One event of a stream."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(value) + b"\n\n"


def error_event(error: ApiError, path: str) -> bytes:
    """The last event of a stream that broke off. Anthropic's clients pass over events without a
    name.
    """
    return server_sent_event(error_body(error, path), "error" if _is_anthropics(path) else "")


def _is_anthropics(path: str) -> bool:
    return path.startswith("/v1/messages")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but only as long as the client waits for it; ClientGoneError otherwise."""
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
    """To a client that is gone."""

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
    """JSON, or a stream of events. Neither is made any further once the client is gone. ignored:
    fields of the body that were passed over; a header names them. end: what a stream ends with.

    A stream begins with its first event, so that what goes wrong before it still has a status of
    its own.
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
    """Server-sent events; what makes them is closed as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str], end: bytes
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._first, self._events, self._end = first, events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
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
                _log.exception("a stream broke off")
                last = error_event(
                    ApiError("the server had an error", status=500, kind="server_error"), path
                )
            await send({"type": "http.response.body", "body": last, "more_body": False})
