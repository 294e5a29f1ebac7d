"""Messages about jobs between the jobs' manager and an engine, which may be in another process."""

from dataclasses import dataclass
from typing import Protocol

from coserve.engine.commands import JobStart


@dataclass(frozen=True, kw_only=True)
class Checkpointed:
    """A checkpoint is complete on disk: the adapter in PEFT's format, and all files needed to
    resume.
    """

    job: str
    """Id of the job."""
    step: int
    """Number of optimizer steps before the checkpoint."""
    directory: str
    """Directory of the checkpoint."""
    listed: bool
    """Whether clients see the checkpoint (every `checkpoint_every_steps`, and the last one); others
    only protect progress.
    """


@dataclass(frozen=True, kw_only=True)
class Contributed:
    """A node has written its contribution for the other nodes of a job, and waits for the
    `Combination` that follows.
    """

    job: str
    """Id of the job."""
    step: int
    """Number of the node's own optimizer steps before the contribution."""
    directory: str
    """Directory of the contribution."""
    meets: bool
    """Whether the node waits for all others."""
    num_trained: int
    """Number of trained rows in the contribution."""


class JobEngine(Protocol):
    """An engine as the jobs' manager sees it.

    Every call raises JobError, AdapterError or DataError with one line, EngineGoneError if the
    engine died before it answered, and, except for `start_job`, JobOverError if the job has ended.
    """

    async def start_job(self, job: JobStart) -> None:
        """Start a job; return when the engine has accepted it."""
        ...

    async def pause_job(self, job: str) -> None:
        """Pause a job; return when its checkpoint is on disk, or could not be written, which is
        logged.
        """
        ...

    async def resume_job(self, job: str) -> None:
        """Resume a paused job."""
        ...

    async def cancel_job(self, job: str) -> None:
        """Cancel a job; return when its checkpoint is on disk, or could not be written, which is
        logged.
        """
        ...
