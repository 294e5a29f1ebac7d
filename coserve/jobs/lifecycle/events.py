"""The events that change jobs: those that reach the mailbox, and those that follow from what the
driver has done.

The time that an event needs is in it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.messages import Checkpointed
from coserve.jobs.records import JobRecord

# What is wanted of a job: run when it can, rest until it is resumed, or end.
DesiredState = Literal["run", "rest", "end"]
Command = Literal["start", "pause", "resume", "cancel"]


@dataclass(frozen=True, kw_only=True)
class PendingCommand:
    """A command that the engine has not answered yet."""

    command: Command
    number: int
    """Differs from that of every other command of this process."""
    epoch: int
    """The state's epoch when the command was sent: an answer from an earlier epoch is of an engine
    that has died.
    """


# -- events from outside --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineReady:
    """A fresh engine takes commands."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineReported:
    """An engine has reported on jobs, in this order: events, then checkpoints."""

    events: Collection[JobEvent] = ()
    checkpoints: Collection[Checkpointed] = ()

    @property
    def jobs(self) -> set[str]:
        """The jobs that the report is about."""
        return {event.job for event in self.events} | {each.job for each in self.checkpoints}


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineLost:
    """An engine has died, and every job that it had with it."""

    now_s: float
    under_way: Collection[str] | None = None
    """Jobs that the engine may have died of; None: any that it had."""
    jobs: Collection[str] | None = None
    """Jobs that the engine had; None: all, since there is no other engine."""

    def had(self, job: str) -> bool:
        """Return whether the engine had a job."""
        return self.jobs is None or job in self.jobs


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineAnswered:
    """The engine has answered a command; error: None if it was done."""

    job: str
    command: PendingCommand
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeUp:
    """A job may have run for as long as it may."""

    job: str


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientAsked:
    """A client wants something of a job of which nothing else is asked."""

    desired: DesiredState


# -- events that follow from what the driver has done -----------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestClosed:
    """The client was answered: what it asked for is done, or cannot be done."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreRefused:
    """The store could not be written. What was asked for counts as not asked, but for an end that
    is certain.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordWritten:
    """The store has a new version of the job's record."""

    job: JobRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadingBegan:
    """The job's files are being read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadingEnded:
    """What is in the job's files is on record, or is a failure."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotRequested:
    """The job waits for a slot, after those with lower tickets."""

    ticket: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotGranted:
    """The job has a slot."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CommandSent:
    """The engine was told something about the job."""

    command: PendingCommand
    now_s: float
    resumed_step: int = 0
    """Of a start: the step from which the job resumes, and that of its newest promised checkpoint.
    """
    listed_step: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepsRecorded:
    """Optimizer steps are on record."""

    num_steps: int
    now_s: float
    last_step_s: float
    """The engine's time of the last of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointRecorded:
    """A checkpoint that users were promised is on record."""

    step: int


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineEnded:
    """The engine has reported that it does not have the job any more."""

    outcome: Literal["succeeded", "failed", "cancelled"]
    message: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobFailed:
    """The job is to end as failed, for a reason that does not come from the engine."""

    code: str
    message: str
    param: str | None = None


# What a mailbox takes, and what changes one state.
EngineEvent = EngineReady | EngineReported | EngineLost | EngineAnswered | TimeUp
Event = (
    EngineLost
    | EngineAnswered
    | ClientAsked
    | RequestClosed
    | StoreRefused
    | RecordWritten
    | ReadingBegan
    | ReadingEnded
    | SlotRequested
    | SlotGranted
    | CommandSent
    | StepsRecorded
    | CheckpointRecorded
    | EngineEnded
    | JobFailed
)
