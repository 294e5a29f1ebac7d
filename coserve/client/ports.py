"""Ports for servers that are started for a while."""

import socket


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
