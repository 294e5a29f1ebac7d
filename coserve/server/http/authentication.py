"""Authentication: each request gets its tenant, from its key, before any route handles it."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.http.responses import error_response
from coserve.server.tenancy.admission import Admission
from coserve.server.tenancy.keys import DEFAULT_TENANT
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.task_turns import current_tenant

# Probes bring no keys, and browsers none before somebody has signed in: the page that asks for the
# key tells nothing.
_OPEN_PATHS = ("/health", "/ready", "/ping", "/", "/ui")
# Header in which Anthropic's clients send the key.
_ANTHROPIC = b"x-api-key"


class TenantMiddleware:
    """Middleware that puts `tenant` and `is_operator` into the request's state.

    It answers 401 where a key is needed and there is no valid one. Each answer has headers about
    what is left of the tenant's limits.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, admission: Admission, open_prefixes: tuple[str, ...] = ()
    ) -> None:
        """Protect an application.

        Args:
            app: The application.
            keys: Keys in force.
            admission: Limits of tenants.
            open_prefixes: Prefixes of paths that need no key.
        """
        self._app, self._keys, self._admission = app, keys, admission
        self._open_prefixes = open_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._tenant(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        ring = self._keys.ring
        scope.setdefault("state", {}).update(tenant=tenant, is_operator=ring.is_operator(tenant))
        current_tenant.set(tenant)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._admission.headers(tenant))
            await send(message)

        await self._app(scope, receive, send_with_limits)

    def _tenant(self, scope: Scope) -> str:
        ring = self._keys.ring
        path: str = scope["path"]
        if ring.is_open or path in _OPEN_PATHS or path.startswith(self._open_prefixes):
            return DEFAULT_TENANT
        headers = dict(scope["headers"])
        header = headers.get(b"authorization", b"").decode("latin-1")
        kind, _, key = header.partition(" ")
        if not header and _ANTHROPIC in headers:
            kind, key = "bearer", headers[_ANTHROPIC].decode("latin-1")
        if kind.lower() != "bearer" or not key.strip():
            raise _unauthorized(
                "You didn't provide an API key: send the header Authorization: Bearer KEY.", None
            )
        tenant = ring.tenant_of(key.strip())
        if tenant is None:
            raise _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return tenant


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"WWW-Authenticate": "Bearer"})
