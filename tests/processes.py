"""Processes as `/proc` shows them."""

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the processes that the main thread of one, or another of its threads, has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def is_sandbox(pid: int) -> bool:
    """Return whether a process is the template of a sandbox, or one of its calls."""
    with suppress(OSError):
        return b"coserve.sandbox.template" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
