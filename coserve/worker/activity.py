"""Record of the jobs that an engine's process is working for, in memory that outlives it, so that
the cause of its death is known.

The process writes ids into memory that it shares with a file, without a system call; the server
reads the file when the process is gone, however it ended. Work on the device comes first: only
while there is none are the jobs recorded whose files threads read or write, such as a job that has
not started, or one that waits for its disk.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coserve.devices.base import Clock, Device
from coserve.devices.messages.commands import Command, Reply
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.errors import CoserveError
from coserve.protocol.run_directory import ACTIVITY_FILE_BYTES, ACTIVITY_HEAD, ACTIVITY_SLOT_BYTES

_NOTHING: frozenset[str] = frozenset()


class Activity:
    """The record of one engine. Belongs to the thread of the step loop, except `files_of`."""

    def __init__(self, path: str | None) -> None:
        """Open the file that the server's `LastActivity` has made; None: nothing is recorded."""
        self._memory: mmap.mmap | None = None
        self._now, self._on_device, self._slot = _NOTHING, _NOTHING, 0
        # A list, since several threads may have files of the same job open.
        self._at_files: list[str] = []
        self._lock = threading.Lock()
        if path is not None:
            descriptor = os.open(path, os.O_RDWR)
            self._memory = mmap.mmap(descriptor, ACTIVITY_FILE_BYTES)
            os.close(descriptor)
            ACTIVITY_HEAD.pack_into(self._memory, 0, os.getpid(), 0)

    def note(self, jobs: frozenset[str]) -> None:
        """Record that the device works for these jobs, and for no other."""
        with self._lock:
            self._on_device = jobs
            self._write()

    def _write(self) -> None:
        jobs = self._on_device or frozenset(self._at_files)
        if jobs == self._now or self._memory is None:
            return
        # Two slots: the new record is complete before one byte makes it the valid one.
        self._now, self._slot = jobs, 1 - self._slot
        ids = " ".join(jobs).encode()[: ACTIVITY_SLOT_BYTES - 1] + b"\0"
        start = ACTIVITY_HEAD.size + self._slot * ACTIVITY_SLOT_BYTES
        self._memory[start : start + len(ids)] = ids
        self._memory[ACTIVITY_HEAD.size - 1] = self._slot

    @contextmanager
    def of(self, job: str) -> Iterator[None]:
        """Record work for a job; an error that ends the process leaves the record."""
        before = self._on_device
        self.note(frozenset((job,)))
        try:
            yield
        # A refusal, after which the process lives; any other error ends it and leaves the record.
        except CoserveError:
            self.note(before)
            raise
        self.note(before)

    @contextmanager
    def of_request(self) -> Iterator[None]:
        """Record that a request is being added, which is the work of no job; an error that ends the
        process leaves the record.
        """
        before = self._on_device
        self.note(_NOTHING)
        try:
            yield
        except CoserveError:
            self.note(before)
            raise
        self.note(before)

    @contextmanager
    def files_of(self, job: str) -> Iterator[None]:
        """Record that any thread reads or writes files of a job; an error there ends no process."""
        with self._lock:
            self._at_files.append(job)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._at_files.remove(job)
                self._write()


class WatchedDevice:
    """A device that records whose work it does.

    The record of a step stands until the next one: what follows from a step may end the process,
    too.
    """

    def __init__(self, device: Device, activity: Activity) -> None:
        self._device, self._activity = device, activity
        self.info = device.info
        self.clock: Clock = device.clock

    def execute(self, command: Command) -> Reply:
        job: str | None = getattr(command, "job", None)
        if job is None:
            return self._device.execute(command)
        with self._activity.of(job):
            return self._device.execute(command)

    def submit(self, batch: StepBatch) -> None:
        self._activity.note(_jobs_in(batch))
        self._device.submit(batch)

    def collect(self) -> StepResult:
        return self._device.collect()

    def close(self) -> None:
        self._device.close()


def _jobs_in(batch: StepBatch) -> frozenset[str]:
    if not (batch.windows or batch.losses or batch.tasklets or batch.updates):
        return _NOTHING
    return frozenset(
        piece.job
        for pieces in (batch.windows, batch.losses, batch.tasklets, batch.updates)
        for piece in pieces
    )
