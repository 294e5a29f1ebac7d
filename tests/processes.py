"""Processes as `/proc` shows them."""

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the processes that any thread of one has started, and that have not ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return [child for child in found if is_alive(child)]


def is_alive(pid: int) -> bool:
    """Return whether a process is there and has not ended; one that nobody has waited for counts as
    ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_sandbox(pid: int) -> bool:
    """Return whether a process is the template of a sandbox, or one of its calls."""
    with suppress(OSError):
        return b"coserve.sandbox.template" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
