"""Servers of this user on this machine: each leaves a file with its URL, which commands read.

A file is locked while its server lives, so that the file of a killed server is recognised and
removed. The directory and its files are closed to other users, and files of other users are not
read: a command may send its API key to the URL that it finds.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from coserve.home import make_private

# Hosts that a server listens at and that no client can connect to, with one that reaches the same
# server.
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_MAX_FILE_BYTES = 10_000


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server on this machine."""

    url: str
    """URL by which this machine reaches it."""
    # Name by which clients ask for it.
    model: str
    pid: int
    """Its process id."""


def servers_directory() -> Path | None:
    """Return the directory of the files: `$COSERVE_RUN_DIR`, or one of the system's for such files.

    None if the variable is empty: then servers leave no files, and commands find none.
    """
    if (variable := os.environ.get("COSERVE_RUN_DIR")) is not None:
        return Path(variable) if variable else None
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "coserve"
    return Path(tempfile.gettempdir()) / f"coserve-{os.geteuid()}"


def reachable_url(scheme: str, host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens on a host."""
    host = _REACHED_AT.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def announced(server: RunningServer) -> Iterator[None]:
    """Let other commands of this user find a server meanwhile, if there is a usable directory."""
    directory = servers_directory()
    if directory is None:
        yield
        return
    path = directory / f"{server.pid}.json"
    file = None
    with suppress(OSError):
        file = _write(server, path)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                path.unlink()
            file.close()


def running_servers() -> list[RunningServer]:
    """Return the running servers, in the order of their URLs; remove files of servers that have
    ended.
    """
    directory = servers_directory()
    servers = []
    with suppress(OSError):
        if directory is not None and directory.stat().st_uid == os.geteuid():
            servers = [
                server for path in directory.glob("*.json") if (server := _read(path)) is not None
            ]
    return sorted(servers, key=lambda server: server.url)


def _write(server: RunningServer, path: Path) -> IO[str] | None:
    """Write a server's file, and return it open and locked; None if the directory is another
    user's.
    """
    if not make_private(path.parent):
        return None
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # before others can find it
        json.dump(asdict(server), file)
        file.flush()
        part.rename(path)
    except OSError:
        file.close()
        part.unlink(missing_ok=True)
        raise
    return file


def _read(path: Path) -> RunningServer | None:
    """Return the server of a file; None if it has ended, or the file is not one of this user's
    servers.
    """
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            if _is_stale(file):
                path.unlink()
                return None
            return RunningServer(**json.loads(file.read(_MAX_FILE_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _is_stale(file: IO[str]) -> bool:
    """Return whether no process holds the lock of a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
