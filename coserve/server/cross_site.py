"""What pages of other sites may have a browser ask of this server."""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.keys_file import Keys
from coserve.server.responses import error_response

_READING = ("GET", "HEAD", "OPTIONS")
_FOREIGN = ("cross-site", "same-site")


class CrossSiteMiddleware:
    """403 for requests that change something and come from a page of another origin, where no key is needed: nothing in
    them says that their sender may ask. With keys, a browser sends none by itself.

    Browsers say where a request comes from in `Sec-Fetch-Site`, which no page can set (https://www.w3.org/TR/fetch-metadata/).
    """

    def __init__(self, app: ASGIApp, keys: Keys, cors_origins: Collection[str]) -> None:
        """cors_origins: whose pages may ask; * for all."""
        self._app, self._keys, self._cors_origins = app, keys, cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass, or refuse it."""
        if scope["type"] == "http" and scope["method"] not in _READING and self._is_foreign(scope):
            message = "A page of another site may not ask for this; --cors-origin names those whose pages may."
            await error_response(ApiError(message, status=403, code="cross_site"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        if not self._keys.ring.is_open or headers.get(b"sec-fetch-site", b"").decode("latin-1") not in _FOREIGN:
            return False
        origin = headers.get(b"origin", b"").decode("latin-1")
        return "*" not in self._cors_origins and origin not in self._cors_origins
