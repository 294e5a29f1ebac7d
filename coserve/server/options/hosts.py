"""Which names requests may use for the server."""

import re
from collections.abc import Sequence
from ipaddress import ip_address

ANY_HOST = "*"
_LOCAL_HOSTS = ("localhost", "*.localhost")
_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*")


def hosts_of(given: Sequence[str], listening_at: str) -> tuple[str, ...]:
    """The names that requests may use for the server: those that were given; or else every one, but
    for a server that only its own machine reaches: that one's own.

    A page that is open in a browser there can have a name of its author's lead to 127.0.0.1 (DNS
    rebinding), and would then use the server as the user could, without any key. Addresses in
    numbers cannot be led anywhere.
    """
    if given:
        return tuple(given)
    return _LOCAL_HOSTS if is_loopback(listening_at) else (ANY_HOST,)


def check_hosts(given: Sequence[str]) -> None:
    """ValueError for what is no name."""
    wrong = next(
        (host for host in given if host != ANY_HOST and _NAME.fullmatch(host) is None), None
    )
    if wrong is not None:
        raise ValueError(
            f"allowed_hosts must be names such as example.com, *.example.com, or *, not {wrong!r}"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
