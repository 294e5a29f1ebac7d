"""What is still to be told of jobs: in the order in which it happened, and each when it is on disk."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.protocol.messages import Reply


@dataclass(kw_only=True)
class PendingReports:
    """What is to be told of jobs, in this order: events, checkpoints, contributions, replies."""

    events: list[JobEvent] = field(default_factory=list)
    checkpoints: list[Checkpointed] = field(default_factory=list)
    contributions: list[Contributed] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.checkpoints or self.contributions or self.replies)


@dataclass(kw_only=True)
class PendingReport:
    """What is to be told when a checkpoint is on disk. written: None if there was nothing to write. is_new: whether the
    checkpoint itself is to be told. name: of the adapter on the device that is on disk with it. contribution: what is
    written is one, for the other nodes of the job.
    """

    job: str
    step: int
    listed: bool
    written: "Future[Path] | None" = None
    is_new: bool = True
    event: JobEvent | None = None
    call: int | None = None
    name: str | None = None
    contribution: Contributed | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may be told."""
        return self.written is None or self.written.done()

    @property
    def has_failed(self) -> bool:
        """Whether it could not be written."""
        return self.written is not None and self.written.done() and self.written.exception() is not None
