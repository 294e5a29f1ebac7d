"""Checks of what a request is addressed to: its host, its path and query, and a proxy's prefix."""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.http.responses import error_response
from coserve.server.options.hosts import ANY_HOST

_LONGEST_ADDRESS = 8192
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


class HeadMiddleware:
    """Middleware that answers HEAD as GET; the HTTP server omits the body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass HEAD to the application as GET."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


class PrefixMiddleware:
    """Middleware that serves routes below a prefix as well.

    Proxies that pass a prefix on need it; without it, routes serve proxies that strip the prefix.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """Wrap an application.

        Args:
            app: The application.
            prefix: Prefix that begins with a slash and ends without one.
        """
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Strip the prefix from the path."""
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            raw = scope["raw_path"].removeprefix(self._prefix.encode())
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix), "raw_path": raw}
        await self._app(scope, receive, send)


class AddressMiddleware:
    """Middleware that answers 400 to hosts that are not allowed, and to impossible addresses."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            hosts: Allowed names; *.example.com for all below one, * for all. IP addresses are
                always allowed.
        """
        self._app, self._hosts = app, [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        raw = scope["raw_path"] + b"?" + scope["query_string"]
        if len(raw) > _LONGEST_ADDRESS:
            raise ApiError(
                f"The URL is too long: at most {_LONGEST_ADDRESS} bytes are read.", status=414
            )
        if b"%00" in raw:
            raise ApiError("The URL contains a NUL character.")
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self._is_allowed(host):
            raise ApiError(
                f"The host {host!r} is not allowed; --allowed-hosts adds names.",
                code="host_not_allowed",
            )

    def _is_allowed(self, header: str) -> bool:
        if ANY_HOST in self._hosts or not header:  # browsers always name a host
            return True
        match = _HOST.fullmatch(header)
        host = match[1].lower().removesuffix(".") if match else ""
        # Rebinding of DNS needs a name that an attacker owns; an address is never one.
        return _is_number(host) or any(
            host == each or (each.startswith("*.") and host.endswith(each[1:]))
            for each in self._hosts
        )


def _is_number(host: str) -> bool:
    try:
        ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
