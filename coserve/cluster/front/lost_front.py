"""What Ray Serve's HTTP servers say of a front that has died, in place of 500 and no more.

They import this by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (see `coserve.cluster.ray.machine`), in processes of
their own.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.http.responses import json_response


class LostFrontMiddleware:
    """Between an HTTP server and the front: a request whose front dies before it has begun to
    answer gets an error that says so. An ASGI application.
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
    """The callback."""
    return [Middleware(LostFrontMiddleware)]


async def refuse(message: str, scope: Scope, receive: Receive, send: Send) -> None:
    """503, to be tried again."""
    error = ApiError(message, status=503)
    await json_response(error.body(), error.status, {"Retry-After": "1"})(scope, receive, send)
