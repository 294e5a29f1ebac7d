"""Deadline of requests for tokens, which applies to answers that have begun, too."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.http.responses import error_event, error_response

_PATHS = (
    *(
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/embeddings",
    ),
    "/v1/messages",
)
# Seconds for which the last event of a stream is offered to a client that does not read.
_LAST_WORDS_S = 5.0


class DeadlineMiddleware:
    """Middleware that answers 504 once a request has taken too long, and cancels it in the engine.

    The time runs from the first byte of the body to the last of the answer. A stream that has begun
    ends with an error event.
    """

    def __init__(self, app: ASGIApp, timeout_s: float | None) -> None:
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass for as long as it may take."""
        if (
            scope["type"] != "http"
            or self._timeout_s is None
            or scope["path"].rstrip("/") not in _PATHS
        ):
            await self._app(scope, receive, send)
            return
        begun: Headers | None = None
        is_complete = False

        async def noted_send(message: Message) -> None:
            nonlocal begun, is_complete
            if message["type"] == "http.response.start":
                begun = Headers(raw=message["headers"])
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )

        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await self._app(scope, receive, noted_send)
        except TimeoutError:
            # A timeout of the application's own.
            if not deadline.expired():
                raise
            if is_complete:
                return
            if begun is None:
                await error_response(self._error())(scope, receive, send)
            elif begun.get("content-type", "").startswith("text/event-stream"):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        last = error_event(self._error(), scope["path"])
                        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _error(self) -> ApiError:
        return ApiError(
            f"The request took longer than the {self._timeout_s:g} s that are allowed "
            f"(--request-timeout).",
            status=504,
            kind="server_error",
            code="request_timeout",
        )
