"""Names by which requests may address the server."""

import re
from collections.abc import Sequence
from ipaddress import ip_address

ANY_HOST = "*"
_LOCAL_HOSTS = ("localhost", "*.localhost")
_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*")


def hosts_of(given: Sequence[str], listening_at: str) -> tuple[str, ...]:
    """Return the names by which requests may address the server.

    Without given names these are all, except for a server that only its own machine can reach: a
    page open in a browser there can make a name of its author's resolve to 127.0.0.1 (DNS
    rebinding), and could then use the server as the user can, without a key. Numeric addresses
    cannot be redirected.

    Args:
        given: Values of --allowed-hosts.
        listening_at: Value of --host.
    """
    if given:
        return tuple(given)
    return _LOCAL_HOSTS if is_loopback(listening_at) else (ANY_HOST,)


def check_hosts(given: Sequence[str]) -> None:
    """Check names of hosts.

    Raises:
        ValueError: One is not a name.
    """
    wrong = next(
        (host for host in given if host != ANY_HOST and _NAME.fullmatch(host) is None), None
    )
    if wrong is not None:
        raise ValueError(
            f"allowed_hosts must be names such as example.com, *.example.com, or *, not {wrong!r}"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
