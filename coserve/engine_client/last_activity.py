"""The server's view of `coserve.worker.activity`: the jobs that an engine's process was working for
when it ended, however it ended.
"""

import signal
from contextlib import suppress
from pathlib import Path

from coserve.protocol.run_directory import ACTIVITY_FILE_BYTES, ACTIVITY_HEAD, ACTIVITY_SLOT_BYTES


class LastActivity:
    """Record of one engine's work, read after its death."""

    def __init__(self, path: Path) -> None:
        """Create the file; if the disk has no room for it, nothing will be known."""
        self.path: Path | None = path
        self._num_oom_kills = _num_oom_kills()
        try:
            # Whole, so that a full disk cannot fail later writes.
            path.write_bytes(bytes(ACTIVITY_FILE_BYTES))
        except OSError:
            path.unlink(missing_ok=True)
            self.path = None

    def is_stopped(self) -> bool:
        """Return whether the process or a rank of it was stopped from outside (SIGSTOP), which is
        the fault of no job.
        """
        content = self._read()
        if content is None:
            return False
        pid, _ = ACTIVITY_HEAD.unpack_from(content)
        return any(map(_is_stopped, (pid, *_children_of(pid))))

    def jobs_at_death(self, status: int, *, hung: bool) -> tuple[str, ...] | None:
        """Return the jobs that may have caused the death: those that the engine worked for; None if
        that is not known.

        A process that was killed from outside counts against no job.

        Args:
            status: Status of the process.
            hung: Whether the server has killed it because it hung.
        """
        # The kernel also kills with SIGKILL for lack of memory, which may be a job's fault.
        if status == -signal.SIGKILL and not hung and _num_oom_kills() == self._num_oom_kills:
            return ()
        content = self._read()
        if content is None:
            return None
        _, slot = ACTIVITY_HEAD.unpack_from(content)
        start = ACTIVITY_HEAD.size + slot * ACTIVITY_SLOT_BYTES
        ids, _, _ = content[start : start + ACTIVITY_SLOT_BYTES].partition(b"\0")
        return tuple(ids.decode().split())

    def _read(self) -> bytes | None:
        try:
            return None if self.path is None else self.path.read_bytes()
        except OSError:
            return None


def _is_stopped(pid: int) -> bool:
    try:
        # The name, in parentheses, may contain any character; the state follows the last ")".
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _children_of(pid: int) -> list[int]:
    """Return the processes that any thread of one has started; none where the system does not list
    them.
    """
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, task.read_text().split())
    return children


def _num_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for memory; 0 where it does not
    say.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
