"""A `coserve up` in a process of its own, as its owner starts it, that may die at any moment and is
started again."""

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from processes import children_of, is_alive, is_sandbox

# Modules that make Python's time of day settable (the monotonic clock cannot jump, here as
# anywhere), and a prompt deadly.
_SEAMS = Path(__file__).with_name("seams")
_START_S, _END_S = 120.0, 90.0


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a process holds."""

    num_files: int
    num_threads: int
    resident_bytes: int


class StormServer:
    """One home, one port; one process after another."""

    def __init__(self, directory: Path, home: Path, model: str, options: Sequence[str]) -> None:
        """directory: for its log, its temporary files and its clock."""
        self.home, self.log = home, directory / "server.log"
        self.temporary, self._clock = directory / "tmp", directory / "clock"
        self._deaths, self._servers = directory / "deaths", directory / "servers"
        self.temporary.mkdir()
        home.mkdir(mode=0o700)
        self.port = _free_port()
        self._command = [
            sys.executable,
            "-m",
            "coserve",
            "up",
            model,
            "--port",
            str(self.port),
            "--home",
            str(home),
        ]
        self._command += options
        self._process: subprocess.Popen[str] | None = None
        self._outages: list[tuple[float, float]] = []
        self._down_s: float | None = time.monotonic()
        self.num_starts = 0

    # -- its life ---------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> bool:
        """Returns whether it came to be ready."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._env(),
            )
        self.num_starts += 1
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else ""
        if not re.search(r"https?://\S+/v1", line):
            self.kill()
            return False
        if self._down_s is not None:
            self._outages.append((self._down_s, time.monotonic()))
        self._down_s = None
        return True

    def kill(self) -> None:
        """As a power failure would end it."""
        self.goes_down()
        if self._process is not None:
            self._process.kill()
            self._wait()

    def end(self) -> int:
        """As its owner does; its status."""
        self.goes_down()
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._wait()

    def goes_down(self) -> None:
        """From now on, connections may break."""
        if self._down_s is None:
            self._down_s = time.monotonic()

    def was_down(self, since_s: float) -> bool:
        """Whether it was down at any time from then until now."""
        return self._down_s is not None or any(end_s >= since_s for _, end_s in self._outages)

    def _wait(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        status = self._process.wait(_END_S)
        self._process.stdout.close()
        return status

    def _env(self) -> dict[str, str]:
        self.set_clock(0)
        path = os.pathsep.join([str(_SEAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            **os.environ,
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "TMPDIR": str(self.temporary),
            "COSERVE_RUN_DIR": str(self._servers),
            "STORM_CLOCK": str(self._clock),
            "STORM_DEATHS": str(self._deaths),
        }

    @property
    def num_deadly_requests(self) -> int:
        """Number of engines that have crashed as they took in the deadly prompt."""
        return self._deaths.stat().st_size if self._deaths.exists() else 0

    def set_clock(self, offset_s: int) -> None:
        """What its processes take for the time of day."""
        new = self._clock.with_suffix(".new")
        new.write_text(str(offset_s))
        new.rename(self._clock)

    # -- its processes ----------------------------------------------------------------

    def fork_server_pid(self) -> int | None:
        """Of the process that forks engines."""
        return _only_child(self.pid)

    def sandbox_pid(self) -> int | None:
        """Return the process in which the server tries grammars, if there is one now."""
        return next((child for child in children_of(self.pid) if is_sandbox(child)), None)

    def engine_pid(self) -> int | None:
        """Of the engine, if there is one now."""
        forks = self.fork_server_pid()
        return None if forks is None else _only_child(forks)

    def processes(self) -> list[int]:
        """All of them, the server first."""
        return list(_descendants(self.pid))

    def resources(self) -> list[Resources]:
        """Of the server, the process that forks engines, and the engine; a sandbox comes and goes
        with its calls."""
        found = []
        for pid in [each for each in self.processes() if not is_sandbox(each)]:
            with suppress(OSError):
                found.append(_resources_of(pid))
        return found


async def until_gone(pids: Sequence[int], limit_s: float) -> list[int]:
    """Those that are still there after that time."""
    until_s = time.monotonic() + limit_s
    while (there := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < until_s:
        await asyncio.sleep(0.05)
    return there


def _only_child(pid: int) -> int | None:
    children = [child for child in children_of(pid) if not is_sandbox(child)]
    return children[-1] if children else None


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from _descendants(child)


def _resources_of(pid: int) -> Resources:
    directory = Path(f"/proc/{pid}")
    return Resources(
        num_files=len(list((directory / "fd").iterdir())),
        num_threads=len(list((directory / "task").iterdir())),
        resident_bytes=int((directory / "statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
