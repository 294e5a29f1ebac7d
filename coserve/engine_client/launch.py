"""Launchers of the engine's process: as a program of its own (here), or by
`coserve.engine_client.fork_server`.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from coserve.home import home_environment

_COMMAND = (sys.executable, "-m", "coserve.worker.process")


class Launched(Protocol):
    """A process, in the form of asyncio's."""

    @property
    def returncode(self) -> int | None:
        """Status of the process; None while it runs, the negative number of the signal that ended
        it.
        """
        ...

    def kill(self) -> None:
        """Kill the process, also one that is stopped."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended, and return its status."""
        ...


# Starts the process, given the first line of its standard input, which stays open as long as this
# process lives, and the home for its measurements (None: the one of the environment).
Launch = Callable[[bytes, Path | None], Awaitable[Launched]]


def program(command: Sequence[str] = _COMMAND) -> Launch:
    """Return a launcher of a command."""

    async def launch(line: bytes, home: Path | None) -> Launched:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr,
            env=os.environ | home_environment(home),
        )
        assert process.stdin is not None
        process.stdin.write(line)
        return process

    return launch
