"""Refusal of requests that a page of another site makes a browser send, where no key is needed."""

from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.server.errors import ApiError
from coserve.server.http.responses import error_response
from coserve.server.tenancy.keys_file import Keys

_READING = ("GET", "HEAD", "OPTIONS")
_FOREIGN_SITES = ("cross-site", "same-site")
_OWN_SITES = ("same-origin", "none")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class CrossSiteMiddleware:
    """Middleware that answers 403 to changing requests from pages of other origins, where no key is
    needed.

    Nothing else in such requests would show that their sender is allowed to make them. With keys, a
    browser sends none by itself.

    Browsers name the origin of a request in `Sec-Fetch-Site`
    (https://www.w3.org/TR/fetch-metadata/), but send that only to localhost and over TLS. Otherwise
    `Origin`, which comes with every changing request, must name the host and port of `Host`. Pages
    cannot set either of them; other clients send neither, and are allowed.
    """

    def __init__(self, app: ASGIApp, keys: Keys, cors_origins: Collection[str]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            keys: Keys in force.
            cors_origins: Origins whose pages are allowed; * for all.
        """
        self._app, self._keys = app, keys
        self._cors_origins = {origin.lower() for origin in cors_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["method"] not in _READING and self._is_foreign(scope):
            message = "Pages of other sites may not send this request; --cors-origin allows a site."
            await error_response(ApiError(message, status=403, code="cross_site"))(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        """Return whether a request comes from a page that is not allowed to send it."""
        if not self._keys.ring.is_open or "*" in self._cors_origins:
            return False
        origins = _values(scope, b"origin")
        if origins and all(origin.lower() in self._cors_origins for origin in origins):
            return False
        sites = _values(scope, b"sec-fetch-site")
        if any(site in _FOREIGN_SITES for site in sites):
            return True
        if sites and all(site in _OWN_SITES for site in sites):
            return False
        # No `Sec-Fetch-Site`, as over plain HTTP: compare the origin with the host.
        hosts = _values(scope, b"host")
        return any(not is_own_origin(origin, host) for origin in origins for host in hosts or [""])


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether an `Origin` names the host and port of a `Host`.

    The scheme may be another one: a proxy that ends TLS passes https on as http. A port that is not
    given is the default port of the origin's scheme.
    """
    try:
        page = urlsplit(origin)
        if page.scheme.lower() not in _DEFAULT_PORTS or page.path or page.query or page.fragment:
            return False
        target = urlsplit(f"{page.scheme}://{host}")
        return page.hostname is not None and _address(
            page.hostname, page.port, page.scheme
        ) == _address(target.hostname or "", target.port, page.scheme)
    except ValueError:  # an invalid port or address
        return False


def _address(name: str, port: int | None, scheme: str) -> tuple[str, int]:
    """Return a host's name, which ignores case and forms of an IP address, and the port."""
    with suppress(ValueError):
        name = str(ip_address(name))
    return name.lower(), _DEFAULT_PORTS[scheme.lower()] if port is None else port


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a header, of which there should be one at most."""
    return [value.decode("latin-1").strip() for header, value in scope["headers"] if header == name]
