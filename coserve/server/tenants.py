"""Who asks: the tenant that a key names, put into every request before any route sees it."""

import hashlib

from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.server.config import DEFAULT_TENANT
from coserve.server.errors import ApiError
from coserve.server.responses import error_response

# Probes bring no keys.
_OPEN_PATHS = ("/health", "/ready")


class TenantMiddleware:
    """Puts `tenant` into the request's state; 401 without a right key, where keys are needed."""

    def __init__(self, app: ASGIApp, tenants: dict[str, str]) -> None:
        """tenants: by key; without any, all clients are one tenant."""
        self._app = app
        # By digest, so that how long a look-up takes says nothing about keys.
        self._tenants = {_digest(key): tenant for key, tenant in tenants.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["tenant"] = self._tenant(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        if not self._tenants or scope["path"] in _OPEN_PATHS:
            return DEFAULT_TENANT
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        kind, _, key = given.partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise _unauthorized("You didn't provide an API key: send the header Authorization: Bearer KEY.", None)
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"WWW-Authenticate": "Bearer"})
