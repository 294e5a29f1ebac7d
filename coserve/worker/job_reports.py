"""What is still to be told of the jobs of one engine: in order for each job, and each report when
it is on disk.

A job has one lane: its reports wait in it for the files that belong to them, which a thread of the
job writes, in order. No job waits for the disk of another. On a disk that is full, a file waits
until there is room, unless its job is in a hurry.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from coserve.engine.commands import JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.errors import DiskFullError
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.protocol.messages import CallReply

_log = logging.getLogger(__name__)

# Copies of a job's tensors that may wait for the disk.
_MAX_COPIES = 2
# Seconds between attempts to write to a disk that is full.
_FULL_DISK_WAIT_S = 1.0


@dataclass(kw_only=True)
class ReadyReports:
    """What is to be told of jobs, in this order: events, checkpoints, contributions, replies."""

    events: list[JobEvent] = field(default_factory=list)
    checkpoints: list[Checkpointed] = field(default_factory=list)
    contributions: list[Contributed] = field(default_factory=list)
    replies: list[CallReply] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.checkpoints or self.contributions or self.replies)


@dataclass(kw_only=True)
class PendingReport:
    """What is to be told of a job when a file is on disk."""

    job: str
    step: int = 0
    listed: bool = False
    """Of a checkpoint: whether users were promised it."""
    written: "Future[Path] | None" = None
    """The directory, when it is written; None: there is nothing to write."""
    is_new: bool = True
    """Whether the checkpoint itself is to be told: it was not before."""
    event: JobEvent | None = None
    call: int | None = None
    """The command whose reply this is."""
    adapter: str | None = None
    """The adapter on the device that is on disk with the checkpoint."""
    contribution: Contributed | None = None
    """What is written is this contribution, for the other nodes of the job."""

    @property
    def is_ready(self) -> bool:
        """Whether the report may be told."""
        return self.written is None or self.written.done()

    @property
    def has_failed(self) -> bool:
        """Whether the file could not be written."""
        return (
            self.written is not None
            and self.written.done()
            and self.written.exception() is not None
        )


class JobLane:
    """One job in the engine's process: how it was started, its reports that wait, and the thread
    that writes.
    """

    def __init__(self) -> None:
        # None: the engine does not have the job; reports of its end may wait.
        self.start: JobStart | None = None
        self.last_checkpoint: PendingReport | None = None
        # Whether the job is paused until the disk has caught up.
        self.is_held = False
        self._waiting: deque[PendingReport] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._urgent = Event()

    def begin(self, start: JobStart) -> None:
        """Take over a job that the engine has from now on."""
        self.start, self._urgent = start, Event()

    def forget(self) -> None:
        """Let go of a job that is over; what waits of it is still told."""
        self.start, self.last_checkpoint, self.is_held = None, None, False

    # -- reports --------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be told."""
        return not self._waiting

    @property
    def has_ready(self) -> bool:
        """Whether something may be told now."""
        return bool(self._waiting) and self._waiting[0].is_ready

    def append(self, report: PendingReport) -> None:
        """Have something told after all that waits."""
        self._waiting.append(report)

    def pop_ready(self) -> PendingReport:
        """Take the first report, which may be told now."""
        return self._waiting.popleft()

    # -- files ----------------------------------------------------------------------

    @property
    def has_most_copies(self) -> bool:
        """Whether as many copies of the job's tensors wait for the disk as may."""
        return len({id(each) for each in self.unwritten()}) >= _MAX_COPIES

    def unwritten(self) -> "list[Future[Path]]":
        """Return the files that are not on disk yet."""
        return [
            each.written
            for each in self._waiting
            if each.written is not None and not each.written.done()
        ]

    def hurry(self) -> None:
        """Have what the job writes wait for no room on a full disk."""
        self._urgent.set()

    def take_time(self) -> None:
        """Have what the job writes wait until there is room."""
        self._urgent.clear()

    def write(self, write: Callable[[], Path], *, until: Event | None = None) -> "Future[Path]":
        """Write something after what the job has had written before; DiskFullError if there is no
        room for it, and the job is in a hurry. until: room is waited for until this is set instead.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoints")
        return self._thread.submit(_when_there_is_room, write, until or self._urgent)

    def close(self) -> None:
        """End the thread, when all is written that there is room for."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _when_there_is_room(write: Callable[[], Path], urgent: Event) -> Path:
    """Write as soon as there is room; DiskFullError if there is none now and it is urgent."""
    is_logged = False
    while True:
        try:
            return write()
        except DiskFullError as error:
            if urgent.is_set():
                raise
            if not is_logged:
                _log.error("%s; it is tried again until there is room", error)
            is_logged = True
        urgent.wait(_FULL_DISK_WAIT_S)
