"""What a jobs' manager and an engine say to each other about jobs; the engine may be in another
process.
"""

from dataclasses import dataclass
from typing import Protocol

from coserve.engine.commands import JobStart


@dataclass(frozen=True, kw_only=True)
class Checkpointed:
    """A checkpoint of a job after `step` optimizer steps is complete on disk: the adapter in PEFT's
    format, and all that it takes to resume. listed: one that users were promised (every
    `checkpoint_every_steps`, and the last), not one that is only there so that nothing is lost.
    """

    job: str
    step: int
    directory: str
    listed: bool


@dataclass(frozen=True, kw_only=True)
class Contributed:
    """A node has written what the other nodes of a job are to have of it, and waits for the
    `Combination` that follows. step: optimizer steps of its own before that. meets: it waits for
    all others. num_trained: trained rows in it.
    """

    job: str
    step: int
    directory: str
    meets: bool
    num_trained: int


class JobEngine(Protocol):
    """An engine as the jobs' manager sees it. Every call raises JobError, AdapterError or DataError
    with one line, EngineGoneError if the engine died before it answered, and but for `start_job`
    JobOverError if the job has ended.
    """

    async def start_job(self, job: JobStart) -> None:
        """Returns when the engine has taken it."""
        ...

    async def pause_job(self, job: str) -> None:
        """It rests; a checkpoint has been written when this returns, or could not be, which is
        logged.
        """
        ...

    async def resume_job(self, job: str) -> None:
        """The inverse."""
        ...

    async def cancel_job(self, job: str) -> None:
        """It is over; likewise."""
        ...
