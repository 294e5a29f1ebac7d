"""Middleware of Ray Serve's HTTP servers: a request whose front has died gets an error that says
so, in place of a bare 500.

The servers import this, in processes of their own, by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
(`coserve.cluster.ray.machine`).
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.http.responses import json_response


class LostFrontMiddleware:
    """An ASGI application between an HTTP server and the front, which answers requests whose front
    dies before it has begun to answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        await self._app(scope, receive, note)
        if scope["type"] == "http" and not has_begun:
            await refuse(
                "The front that had this request was lost: ask again in a few seconds.",
                scope,
                receive,
                send,
            )


def http_middlewares() -> list[Middleware]:
    """Return the middlewares; the callback that Ray Serve imports."""
    return [Middleware(LostFrontMiddleware)]


async def refuse(message: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with 503, which clients try again."""
    error = ApiError(message, status=503)
    await json_response(error.body(), error.status, {"Retry-After": "1"})(scope, receive, send)
