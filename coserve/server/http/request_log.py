"""Request ids, which are in answers, log lines and errors; and one log line per request."""

import logging
import re
import time
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.logs import request_id

_log = logging.getLogger(__name__)

HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_MAX_PATH = 500
# Keys in a request's state.
_IS_GIVEN, _COMPLETION = "request_id_is_given", "completion"


class RequestLogMiddleware:
    """Middleware that gives each request an id, and logs the request when it is over.

    A client's `x-request-id` is used if it is safe to log. The level of the line is warning where
    the server failed, and info otherwise.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = _given(scope)
        scope.setdefault("state", {})[_IS_GIVEN] = bool(client_id)
        # Never taken back: the task ends with the request, and what uvicorn logs of it comes later.
        request_id.set(client_id or f"req-{uuid4().hex}")
        started_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id.get()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500
            raise
        finally:
            _write(scope, status, time.monotonic() - started_s)


def note_completion(request: Request, id: str) -> None:
    """Use a completion's id as the request's id, unless the client gave one."""
    state = request.scope["state"]
    state[_COMPLETION] = id
    if not state[_IS_GIVEN]:
        request_id.set(id)


def _given(scope: Scope) -> str:
    text = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
    return text if _SANE.fullmatch(text) else ""


def _write(scope: Scope, status: int, duration_s: float) -> None:
    """Log a request; the status is 0 if the client left before its answer began."""
    path = scope["path"][:_MAX_PATH]
    more = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "duration_s": round(duration_s, 6),
        "client": scope["client"][0] if scope.get("client") else None,
        "tenant": scope["state"].get("tenant"),
        _COMPLETION: scope["state"].get(_COMPLETION),
    }
    # 503 asks to come later: what is the matter has a line of its own.
    level = logging.WARNING if status >= 500 and status != 503 else logging.INFO
    _log.log(level, "%s %r: %d in %.3f s", scope["method"], path, status, duration_s, extra=more)
