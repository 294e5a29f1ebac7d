"""Events that change jobs: those that reach the mailbox, and those that follow from what the driver
does.

An event carries the time that it needs, so that no state reads a clock.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.messages import Checkpointed
from coserve.jobs.records import JobRecord

# State that a job should reach: run when it can, rest until it is resumed, or end.
DesiredState = Literal["run", "rest", "end"]
Command = Literal["start", "pause", "resume", "cancel"]


@dataclass(frozen=True, kw_only=True)
class PendingCommand:
    """A command that the engine has not answered yet."""

    command: Command
    """Verb that was sent."""
    number: int
    """Number of the command, unique in this process."""
    epoch: int
    """Epoch of the job's state when the command was sent; an answer from an earlier epoch comes
    from an engine that has died.
    """


# -- events from outside --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineReady:
    """A fresh engine accepts commands."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineReported:
    """An engine has reported on jobs."""

    events: Collection[JobEvent] = ()
    """Events of jobs, in order."""
    checkpoints: Collection[Checkpointed] = ()
    """Checkpoints that are complete on disk; they follow the events."""

    @property
    def jobs(self) -> set[str]:
        """The jobs that the report is about."""
        return {event.job for event in self.events} | {each.job for each in self.checkpoints}


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineLost:
    """An engine has died with all jobs that it had."""

    now_s: float
    """Time of the loss, by the server's clock."""
    under_way: Collection[str] | None = None
    """Jobs that may have caused the death; None: any that the engine had."""
    jobs: Collection[str] | None = None
    """Jobs that the engine had; None: all, since there is no other engine."""

    def had(self, job: str) -> bool:
        """Return whether the engine had a job."""
        return self.jobs is None or job in self.jobs


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineAnswered:
    """The engine has answered a command."""

    job: str
    """Id of the job."""
    command: PendingCommand
    """Command that was answered."""
    error: Exception | None = None
    """Error of the command; None if it was done."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeUp:
    """A job may have reached its time limit."""

    job: str
    """Id of the job."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientAsked:
    """A client has requested a state of a job that has no other open request."""

    desired: DesiredState
    """State that the client requested."""


# -- events that follow from what the driver has done -----------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestClosed:
    """The client was answered: its request was fulfilled or refused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreRefused:
    """The store could not be written. The client's request is dropped, unless it is an end that is
    already certain.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordWritten:
    """The store has a new version of the job's record."""

    job: JobRecord
    """The new record."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadingBegan:
    """The job's files are being read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadingEnded:
    """The job's files have been read: their contents are on record, or the job has failed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotRequested:
    """The job waits for a training slot."""

    ticket: int
    """Position in the queue; lower tickets come first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotGranted:
    """The job has a training slot."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CommandSent:
    """A command about the job was sent to the engine."""

    command: PendingCommand
    """The command, now pending."""
    now_s: float
    """Time at which it was sent, by the server's clock."""
    resumed_step: int = 0
    """Step from which a started job resumes."""
    listed_step: int | None = None
    """Step of the newest listed checkpoint of a started job."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepsRecorded:
    """Optimizer steps are on record."""

    num_steps: int
    """Number of new optimizer steps."""
    now_s: float
    """Time of the report, by the server's clock."""
    last_step_s: float
    """Time of the last of these steps, by the engine's clock."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointRecorded:
    """A listed checkpoint is on record."""

    step: int
    """Optimizer step of the checkpoint."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineEnded:
    """The engine has reported that a job has ended there."""

    outcome: Literal["succeeded", "failed", "cancelled"]
    """Outcome in the engine; a job that was cancelled there need not be over."""
    message: str = ""
    """Reason of a failure."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobFailed:
    """The job is to end as failed, for a reason that does not come from the engine."""

    code: str
    """Code of the job's error."""
    message: str
    """Message of the job's error."""
    param: str | None = None
    """Field that the error is about, if any."""


# Events that a mailbox takes, and events that change one state.
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
