"""No request is read further than its body may be long."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.responses import error_response

_UPLOADS = "/v1/files"
# Of a multipart upload, around the file.
_AROUND_A_FILE = 1 << 20


class BodyLimitMiddleware:
    """413 for bodies that are too long, also where their Content-Length says otherwise."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_upload_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._max_upload_bytes = max_upload_bytes + _AROUND_A_FILE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass as far as it is not too long."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._max_upload_bytes if scope["path"].rstrip("/") == _UPLOADS else self._max_body_bytes
        refusal = error_response(
            ApiError(f"the request's body is too long: at most {limit} bytes are read", status=413, code="too_large")
        )
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            await refusal(scope, receive, send)
            return
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise _TooLongError
            return message

        async def send_unless_too_long(message: Message) -> None:
            # What the application makes of a body that breaks off is no answer.
            if num_bytes <= limit:
                await send(message)

        try:
            await self._app(scope, receive_some, send_unless_too_long)
        except Exception:
            if num_bytes <= limit:
                raise
        if num_bytes > limit:
            await refusal(scope, receive, send)


class _TooLongError(Exception):
    pass
