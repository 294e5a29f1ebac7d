"""Reports about the jobs of one engine, each sent once its file is on disk, and in order for each
job.

A job has one lane: its reports wait in it for their files, which a thread of the job writes, in
order. No job waits for the disk of another. On a full disk, a file waits until there is room,
unless its job is in a hurry.
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

# Maximum number of copies of a job's tensors that wait for the disk.
_MAX_COPIES = 2
# Seconds between attempts to write to a disk that is full.
_FULL_DISK_WAIT_S = 1.0


@dataclass(kw_only=True)
class ReadyReports:
    """Reports that are ready to be sent, in this order."""

    events: list[JobEvent] = field(default_factory=list)
    """Events of jobs."""
    checkpoints: list[Checkpointed] = field(default_factory=list)
    """Checkpoints that are on disk."""
    contributions: list[Contributed] = field(default_factory=list)
    """Contributions for the other nodes of jobs."""
    replies: list[CallReply] = field(default_factory=list)
    """Replies to commands."""

    def __bool__(self) -> bool:
        return bool(self.events or self.checkpoints or self.contributions or self.replies)


@dataclass(kw_only=True)
class PendingReport:
    """A report about a job that is ready once a file is on disk."""

    job: str
    """Id of the job; "" if it is about no job."""
    step: int = 0
    """Number of optimizer steps before it."""
    listed: bool = False
    """Whether clients see the checkpoint."""
    written: "Future[Path] | None" = None
    """The directory, once it is written; None: there is nothing to write."""
    is_new: bool = True
    """Whether the checkpoint itself is to be reported, since it was not before."""
    event: JobEvent | None = None
    """Event to report, if any."""
    call: int | None = None
    """Command to reply to, if any."""
    adapter: str | None = None
    """Loaded adapter that is on disk with the checkpoint."""
    contribution: Contributed | None = None
    """Contribution that is being written, if any."""

    @property
    def is_ready(self) -> bool:
        """Return whether the report may be sent."""
        return self.written is None or self.written.done()

    @property
    def has_failed(self) -> bool:
        """Return whether the file could not be written."""
        return (
            self.written is not None
            and self.written.done()
            and self.written.exception() is not None
        )


class JobLane:
    """State of one job in the engine's process: its start command, its waiting reports, and the
    thread that writes.
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
        """Set the command that started the job."""
        # A new event: writes of the run before may be in a hurry.
        self.start, self._urgent = start, Event()

    def forget(self) -> None:
        """Drop a job that is over; waiting reports are still sent."""
        self.start, self.last_checkpoint, self.is_held = None, None, False

    # -- reports --------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Return whether no report is waiting."""
        return not self._waiting

    @property
    def has_ready(self) -> bool:
        """Return whether a report may be sent now."""
        return bool(self._waiting) and self._waiting[0].is_ready

    def append(self, report: PendingReport) -> None:
        """Append a report after all that wait."""
        self._waiting.append(report)

    def pop_ready(self) -> PendingReport:
        """Take the first report, which is ready."""
        return self._waiting.popleft()

    # -- files ----------------------------------------------------------------------

    @property
    def has_max_copies(self) -> bool:
        """Return whether the maximum number of copies of the job's tensors waits for the disk."""
        # Two reports may share one file, which is a single copy.
        return len({id(each) for each in self.unwritten()}) >= _MAX_COPIES

    def unwritten(self) -> "list[Future[Path]]":
        """Return the files that are not on disk yet."""
        return [
            each.written
            for each in self._waiting
            if each.written is not None and not each.written.done()
        ]

    def hurry(self) -> None:
        """Let writes fail at once on a full disk."""
        self._urgent.set()

    def take_time(self) -> None:
        """Let writes wait on a full disk until there is room."""
        self._urgent.clear()

    def write(self, write: Callable[[], Path], *, until: Event | None = None) -> "Future[Path]":
        """Start a write after all earlier ones of the job; it fails with DiskFullError if there is
        no room and the job is in a hurry.

        Args:
            write: Writes a file.
            until: Event that ends the wait for room (default: the job's hurry).
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoints")
        return self._thread.submit(_when_there_is_room, write, until or self._urgent)

    def close(self) -> None:
        """End the thread, once everything is written that there is room for."""
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
                _log.error("%s; trying again until there is room", error)
            is_logged = True
        urgent.wait(_FULL_DISK_WAIT_S)
