"""What a request is addressed to: the host that it names, and the characters of its path and query."""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.hosts import ANY_HOST
from coserve.server.responses import error_response

_LONGEST_ADDRESS = 8192
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


class AddressMiddleware:
    """400 for a host that is not allowed, and for addresses that nothing can be at."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """hosts: names; *.example.com for all below one; * for all. Addresses in numbers are always allowed."""
        self._app, self._hosts = app, [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass, or refuse it."""
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
            raise ApiError(f"The URL is too long: at most {_LONGEST_ADDRESS} bytes are read.", status=414)
        if b"%00" in raw:
            raise ApiError("The URL holds a NUL, which is no character.")
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self._is_allowed(host):
            raise ApiError(
                f"The host {host!r} is not one of this server's; --allowed-hosts names those that are.",
                code="host_not_allowed",
            )

    def _is_allowed(self, header: str) -> bool:
        if ANY_HOST in self._hosts or not header:  # browsers always name a host
            return True
        found = _HOST.fullmatch(header)
        host = found[1].lower().removesuffix(".") if found else ""
        return _is_number(host) or any(
            host == each or (each.startswith("*.") and host.endswith(each[1:])) for each in self._hosts
        )


def _is_number(host: str) -> bool:
    try:
        ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
