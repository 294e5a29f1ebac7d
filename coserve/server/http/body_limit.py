"""Limits on bodies of requests: their size, their duration, and their bytes in memory together."""

import asyncio
import re
import time
from typing import NoReturn

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.server.bodies.reader import SMALL_BODY_BYTES
from coserve.server.errors import ApiError
from coserve.server.http.responses import error_response

_UPLOADS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")
# Bytes of a multipart upload around its file.
_AROUND_A_FILE = 1 << 20
# Paths whose bodies have prompts.
_LONG_BODIES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/chat/completions/batch", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
)
# Maximum size of all other bodies, which have settings.
_SETTINGS_BYTES = 1_000_000
# Rate of a body that is never too slow.
_MIN_BYTES_PER_S = 10_000
# Memory for bodies, in bodies of the maximum size.
_MAX_LONG_BODIES = 8


class BodyLimitMiddleware:
    """Middleware that limits bodies of requests.

    It answers 415 to a compressed body; 413 to one that is too long, even if its Content-Length
    says otherwise; 408 to one that arrives too slowly; 503 if too many bytes of bodies are in
    memory. Uploads are streamed to the disk and do not count there. A client that leaves before its
    body is complete gets no answer, and no error is logged.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, max_upload_bytes: int, timeout_s: float
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            max_body_bytes: Maximum size of a body with a prompt.
            max_upload_bytes: Maximum size of an uploaded file.
            timeout_s: Time within which a body must arrive; a fast one may take longer.
        """
        self._app, self._timeout_s = app, timeout_s
        self._max_body_bytes, self._max_upload_bytes = (
            max_body_bytes,
            max_upload_bytes + _AROUND_A_FILE,
        )
        self._memory = _Memory(_MAX_LONG_BODIES * max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its body limited."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        limit = self._limit(path)
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            await error_response(_encoded(encoding))(scope, receive, send)
            return
        declared = headers.get(b"content-length", b"0")
        # 19 digits exceed every limit, and int() refuses very long numbers.
        if declared.isdigit() and int(declared[:19]) > limit:
            await error_response(_too_long(limit))(scope, receive, send)
            return
        memory = None if _UPLOADS.fullmatch(path) else self._memory
        body = _Body(receive, send, limit, self._timeout_s, memory)
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            if not body.is_cut:
                raise
        except Exception:
            # `receive` has raised the refusal inside the application, which may have wrapped it.
            if body.refusal is None:
                raise
        finally:
            body.forget()
        if body.refusal is not None and not body.is_answered:
            await error_response(body.refusal)(scope, receive, send)

    def _limit(self, path: str) -> int:
        if _UPLOADS.fullmatch(path):
            return self._max_upload_bytes
        return (
            self._max_body_bytes
            if path in _LONG_BODIES
            else min(_SETTINGS_BYTES, self._max_body_bytes)
        )


class _Memory:
    """Count of bytes of long bodies that have arrived but are not parsed yet."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0


class _Body:
    """Body of one request on its way to the application.

    `refusal` is the error for which the rest of it is not read; `is_cut` says that the client left
    before the end of it.
    """

    def __init__(
        self, receive: Receive, send: Send, limit: int, timeout_s: float, memory: _Memory | None
    ) -> None:
        self._receive, self._send, self._limit, self._memory = receive, send, limit, memory
        self._until_s = time.monotonic() + timeout_s
        self._num_bytes, self._num_held, self._is_whole = 0, 0, False
        self.refusal: ApiError | None = None
        self.is_answered = self.is_cut = False

    async def receive(self) -> Message:
        """Return the next message.

        After the last piece of the body, the application has parsed it and waits for the client to
        leave.
        """
        if self._is_whole:
            self.forget()
            return await self._receive()
        message = await self._next()
        self.is_cut = message["type"] == "http.disconnect"
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._limit:
            self._refuse(_too_long(self._limit))
        if self._memory is not None and self._num_bytes > SMALL_BODY_BYTES:
            self._hold(self._memory)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer, unless the body was refused or cut off before the answer
        began.
        """
        if self.is_answered or not (self.refusal or self.is_cut):
            self.is_answered = True
            self.forget()
            await self._send(message)

    def forget(self) -> None:
        """Count the body as no longer in memory."""
        if self._memory is not None:
            self._memory.num_bytes -= self._num_held
        self._num_held = 0

    async def _next(self) -> Message:
        # Every byte that has arrived extends the time, so that a fast body may take longer.
        left_s = self._until_s + self._num_bytes / _MIN_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await self._receive()
        except TimeoutError:
            self._refuse(_too_slow(self._num_bytes))

    def _hold(self, memory: _Memory) -> None:
        memory.num_bytes += self._num_bytes - self._num_held
        self._num_held = self._num_bytes
        if memory.num_bytes > memory.most_bytes:
            self._refuse(_too_many(memory.most_bytes))

    def _refuse(self, refusal: ApiError) -> NoReturn:
        self.refusal = refusal
        self.forget()
        raise refusal


def _encoded(encoding: str) -> ApiError:
    return ApiError(
        f"The request's Content-Encoding is {encoding!r}, which is not supported: send the body "
        f"uncompressed.",
        status=415,
        code="unsupported_content_encoding",
        headers={"Accept-Encoding": "identity"},
    )


def _too_long(limit: int) -> ApiError:
    message = f"The request's body is too long: at most {limit} bytes are read."
    return ApiError(message, status=413, code="too_large")


def _too_slow(num_bytes: int) -> ApiError:
    return ApiError(
        f"The request's body arrived too slowly: {num_bytes} bytes have arrived.",
        status=408,
        code="request_timeout",
        headers={"Connection": "close"},
    )


def _too_many(limit: int) -> ApiError:
    return ApiError(
        f"The server holds {limit} bytes of other requests' bodies; try again in a second.",
        status=503,
        kind="server_error",
        code="overloaded",
        headers={"Retry-After": "1"},
    )
