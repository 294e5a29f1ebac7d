"""Secrets that a process is given in its environment, and should not show there once it has
them.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

# The keys that a server asks for, and the one that a command sends to a server.
SERVER_KEYS, CLIENT_KEY = "COSERVE_API_KEYS", "COSERVE_API_KEY"
# The URL of a server's database, with its password.
DATABASE = "COSERVE_DATABASE"
# Fields of /proc/PID/stat, counted from the one after the command's name: where the environment
# that the process began with lies in its memory (proc(5): env_start and env_end).
_ENV_START, _ENV_END = 47, 48


def take_variable(name: str) -> str:
    """Return an environment variable ("" if it is not set), and remove it from this process and
    from what it starts.

    On Linux it is overwritten in memory, too: /proc/PID/environ always shows what a process began
    with, and so does that of its forks. To be called before there are any.
    """
    value = os.environ.pop(name, "")
    if sys.platform == "linux":
        with suppress(
            OSError, ValueError, IndexError
        ):  # no /proc here, or this process may not see it
            _overwrite(os.fsencode(name) + b"=")
    return value


def take_database(given: str | None) -> str | None:
    """Return the URL of a database that was given, or else that of the environment, which is
    removed from there in either case; None: SQLite in the home.
    """
    in_environment = take_variable(DATABASE)
    return given or in_environment or None


def _overwrite(beginning: bytes) -> None:
    """Fill what comes after `beginning` with zeros, in the environment that the process began
    with.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        place = start
        for entry in memory.read(end - start).split(b"\0"):
            if entry.startswith(beginning):
                memory.seek(place + len(beginning))
                memory.write(bytes(len(entry) - len(beginning)))
            place += len(entry) + 1
