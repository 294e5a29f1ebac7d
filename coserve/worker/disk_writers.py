"""Threads that write what is copied of jobs, one for each: none waits for the disk of another.

On a disk that is full a copy waits until there is room, unless its job is in a hurry.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from coserve.errors import DiskFullError

_log = logging.getLogger(__name__)

# How often it is tried again to write to a disk that is full.
_FULL_DISK_WAIT_S = 1.0


class DiskWriters:
    """Of the jobs of one engine, by their ids."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._urgent: dict[str, Event] = {}
        self._closing = Event()

    def open(self, job: str) -> None:
        """A job begins."""
        self._urgent[job] = Event()

    def drop(self, job: str) -> None:
        """It is over, and all is written. No error if it is not there."""
        self._urgent.pop(job, None)
        if (thread := self._threads.pop(job, None)) is not None:
            thread.shutdown()

    def hurry(self, job: str) -> None:
        """What it writes waits for no room."""
        self._urgent[job].set()

    def take_time(self, job: str) -> None:
        """The inverse."""
        self._urgent[job].clear()

    def write(self, job: str, write: Callable[[], Path], *, even_in_a_hurry: bool = False) -> "Future[Path]":
        """Have something written after what the job has had written before; DiskFullError if there is no room for it,
        and none is waited for. even_in_a_hurry: room is waited for until all is closed.
        """
        if job not in self._threads:
            self._threads[job] = ThreadPoolExecutor(1, "checkpoints")
        urgent = self._closing if even_in_a_hurry else self._urgent[job]
        return self._threads[job].submit(_when_there_is_room, write, urgent)

    def hurry_all(self) -> None:
        """Nothing waits for room any more."""
        self._closing.set()
        for urgent in self._urgent.values():
            urgent.set()

    def close(self) -> None:
        """End the threads, when all is written that there is room for."""
        self.hurry_all()
        for thread in self._threads.values():
            thread.shutdown()


def _when_there_is_room(write: Callable[[], Path], urgent: Event) -> Path:
    """Write as soon as there is room; DiskFullError if there is none now and it is urgent."""
    is_told = False
    while True:
        try:
            return write()
        except DiskFullError as error:
            if urgent.is_set():
                raise
            if not is_told:
                _log.error("%s; it is tried again until there is room", error)
            is_told = True
        urgent.wait(_FULL_DISK_WAIT_S)
