"""State of a job that has not ended, and how events change it: `apply(state, event)` is pure.

A `JobState` holds all that decides what happens next to a job: its record in the store, what a
client has requested, and what the engine has of the job. `coserve.jobs.lifecycle.plan` derives the
next action from it; `coserve.jobs.lifecycle.driver` carries that out and applies the events that
follow. No clock, store or engine is used here: an event carries the time it needs.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from coserve.errors import CoserveError, EngineGoneError, JobOverError
from coserve.jobs.lifecycle.estimate import ProgressMeter
from coserve.jobs.lifecycle.events import (
    CheckpointRecorded,
    ClientAsked,
    CommandSent,
    DesiredState,
    EngineAnswered,
    EngineEnded,
    EngineLost,
    Event,
    JobFailed,
    PendingCommand,
    ReadingBegan,
    ReadingEnded,
    RecordWritten,
    RequestClosed,
    SlotGranted,
    SlotRequested,
    StepsRecorded,
    StoreRefused,
)
from coserve.jobs.records import JobRecord, JobStatus

# Whether the engine does not have the job, runs it, has paused it, or has ended it (the outcome may
# still be reported).
EngineState = Literal["absent", "running", "paused", "ended"]
# Place to train, which a job keeps, across engines, until it ends or is paused.
Slot = Literal["none", "waiting", "held"]

# A queued job succeeds without running if its last checkpoint is complete already.
TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    "validating_files": frozenset(("queued", "paused", "failed", "cancelled")),
    "queued": frozenset(("running", "paused", "succeeded", "failed", "cancelled")),
    "running": frozenset(("queued", "paused", "succeeded", "failed", "cancelled")),
    "paused": frozenset(
        ("validating_files", "queued", "running", "succeeded", "failed", "cancelled")
    ),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


def is_legal(old: JobStatus, new: JobStatus) -> bool:
    """Return whether a job may change from one status to another; no change is always legal."""
    return old == new or new in TRANSITIONS[old]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of one job that has not ended."""

    job: JobRecord
    """Record of the job, as the store has it."""
    has_model: bool = True
    """Whether this server has the model that the job trains; a job without it waits."""
    is_reading: bool = False
    """Whether the job's files are being read."""
    asked: DesiredState | None = None
    """State that a client has requested and that is not reached yet."""
    engine: EngineState = "absent"
    """What the engine has of the job."""
    pending: PendingCommand | None = None
    """Command that the engine has not answered yet; until then no other command about the job is
    sent.
    """
    epoch: int = 0
    """Number of engines that have died, in this process, and that had the job or would have had it.
    """
    has_succeeded: bool = False
    """Whether the job has succeeded in the engine."""
    listed_step: int | None = None
    """Step of the newest listed checkpoint; None: there is none since the job was started."""
    failure: dict[str, Any] | None = None
    """Reason why the job is to end as failed: code, message, param."""
    slot: Slot = "none"
    """Training slot of the job. A granted slot is kept, across engines, until the job ends or is
    paused.
    """
    ticket: int = 0
    """Position in the queue for a slot; lower tickets come first."""
    meter: ProgressMeter | None = None
    """Step times of the current run, for estimates; None unless the job runs."""
    last_step_s: float | None = None
    """Time of the last optimizer step of the current run, by the engine's clock."""
    resumed_step: int = 0
    """Step from which the engine resumed the job."""
    was_resumed: bool = False
    """Whether a client has resumed the job since it was started in the engine."""
    earlier_s: float = 0.0
    """Seconds that the job ran before `runs_since_s`, in this process."""
    runs_since_s: float | None = None
    """Time at which the job started to run, by the server's clock; None: it does not run."""

    @property
    def id(self) -> str:
        """The job's id."""
        return self.job.id

    @property
    def status(self) -> JobStatus:
        """The job's status in the store."""
        return self.job.status

    @property
    def desired(self) -> DesiredState:
        """State that the job should reach: a failed job ends; otherwise as a client has requested;
        otherwise as its status implies.
        """
        if self.failure is not None:
            return "end"
        return self.asked or ("rest" if self.status == "paused" else "run")

    @property
    def has_last_checkpoint(self) -> bool:
        """Return whether the checkpoint of the job's last completed step is on record (the job may
        have stopped early).
        """
        return self.listed_step == self.job.num_steps_done

    @property
    def has_ended(self) -> bool:
        """Return whether the job is over in the engine, successfully or not."""
        return self.has_succeeded or self.failure is not None

    @property
    def is_end_certain(self) -> bool:
        """Return whether the engine has ended the job, or was told to, which cannot be undone."""
        return self.engine == "ended" or (
            self.pending is not None and self.pending.command == "cancel"
        )

    def ran_s(self, now_s: float) -> float:
        """Return the seconds that the job has run so far, in this process."""
        return self.earlier_s + (0.0 if self.runs_since_s is None else now_s - self.runs_since_s)


def apply(state: JobState, event: Event) -> JobState:
    """Return the state after an event."""
    match event:
        case RecordWritten(job=job):
            return _recorded(state, job)
        case ReadingBegan() | ReadingEnded():
            return replace(state, is_reading=isinstance(event, ReadingBegan))
        case ClientAsked() | RequestClosed() | StoreRefused():
            return _after_request(state, event)
        case SlotRequested() | SlotGranted():
            return _after_slot(state, event)
        case StepsRecorded() | CheckpointRecorded():
            return _after_progress(state, event)
        case CommandSent() | EngineAnswered() | EngineEnded() | EngineLost():
            return _after_engine(state, event)
        case JobFailed():
            return replace(state, failure=_failure(event.code, event.message, event.param))


def _after_request(state: JobState, event: ClientAsked | RequestClosed | StoreRefused) -> JobState:
    """Note what a client has asked for, or that it is not asked for any more."""
    match event:
        case ClientAsked(desired=desired):
            return replace(state, asked=desired)
        # The engine ends the job in any case; the record follows once the store works.
        case StoreRefused() if state.asked == "end" and state.is_end_certain:
            return state
        case RequestClosed() | StoreRefused():
            return _without_request(state)


def _after_slot(state: JobState, event: SlotRequested | SlotGranted) -> JobState:
    """Note whether the job waits for a slot or has one."""
    match event:
        case SlotRequested(ticket=ticket):
            return replace(state, slot="waiting", ticket=ticket)
        case SlotGranted():
            return replace(state, slot="held")


def _after_progress(state: JobState, event: StepsRecorded | CheckpointRecorded) -> JobState:
    """Note optimizer steps, or a checkpoint, that are on record."""
    match event:
        case StepsRecorded(num_steps=num_steps, now_s=now_s):
            meter = None if state.meter is None else state.meter.after_steps(num_steps, now_s)
            return replace(state, meter=meter, last_step_s=event.last_step_s)
        case CheckpointRecorded(step=step):
            return replace(state, listed_step=step)


def _after_engine(
    state: JobState, event: CommandSent | EngineAnswered | EngineEnded | EngineLost
) -> JobState:
    """Note what the engine was told, what it has done, or that it has died."""
    match event:
        case CommandSent():
            return _sent(state, event)
        case EngineAnswered():
            return _answered(state, event)
        case EngineEnded():
            return _ended(state, event)
        case EngineLost(now_s=now_s):
            # `pending` stays: its answer carries the old epoch. A success whose last checkpoint is
            # not on record is lost with the engine, so the job resumes.
            lost = replace(_stopped(state, now_s), epoch=state.epoch + 1)
            return replace(lost, engine="absent", has_succeeded=False, meter=None)


def _recorded(state: JobState, job: JobRecord) -> JobState:
    """Update the record; a job that has just been paused gives its slot back."""
    # A chained comparison: paused now, and not before.
    if job.status == "paused" != state.status:
        return replace(state, job=job, slot="none", meter=None)
    return replace(state, job=job)


def _without_request(state: JobState) -> JobState:
    """Drop the client's request; a job that stays paused needs no slot."""
    rests = state.status == "paused" and state.engine != "running" and state.pending is None
    return replace(state, asked=None, slot="none" if rests else state.slot)


def _sent(state: JobState, event: CommandSent) -> JobState:
    """Set the pending command, and note when the job started to run or stopped."""
    # The clock of the time limit stops with any command; "start" and "resume" restart it.
    state = replace(_stopped(state, event.now_s), pending=event.command)
    if event.command.command in ("pause", "cancel"):
        return state
    state = replace(
        state, runs_since_s=event.now_s, meter=ProgressMeter((event.now_s,)), last_step_s=None
    )
    if event.command.command == "resume":
        return state
    return replace(
        state,
        # Before the answer, since the job's first reports may overtake it.
        engine="running",
        resumed_step=event.resumed_step,
        listed_step=event.listed_step,
        was_resumed=False,
    )


def _answered(state: JobState, event: EngineAnswered) -> JobState:
    """Apply an answer of the engine; only the answer to the pending command changes anything."""
    if state.pending != event.command:
        return state
    state, command, error = replace(state, pending=None), event.command, event.error
    # The answer comes from an engine that has died, or is the news of its death.
    if command.epoch != state.epoch or isinstance(error, EngineGoneError):
        return replace(state, engine="absent")
    if command.command == "start":
        return state if error is None else replace(state, engine="absent", failure=_refused(error))
    # The job ended before the command arrived; its outcome is reported separately.
    if isinstance(error, JobOverError):
        return replace(state, engine="ended")
    # Nothing changed, or the job has already ended.
    if error is not None or state.engine == "ended":
        return state
    if command.command == "resume":
        return replace(state, engine="running", was_resumed=True)
    return replace(state, engine="paused" if command.command == "pause" else "ended")


def _ended(state: JobState, event: EngineEnded) -> JobState:
    """Apply the job's end in the engine. A job that was cancelled there need not be over."""
    if event.outcome == "cancelled":
        return replace(state, engine="absent", has_succeeded=False)
    # A failure noted earlier, such as the time limit, outlives a success in the engine.
    failure = (
        state.failure
        if event.outcome == "succeeded"
        else _failure("training_failed", event.message)
    )
    return replace(
        state, engine="ended", has_succeeded=event.outcome == "succeeded", failure=failure
    )


def _stopped(state: JobState, now_s: float) -> JobState:
    return replace(state, earlier_s=state.ran_s(now_s), runs_since_s=None)


def _refused(error: Exception) -> dict[str, Any]:
    is_expected = isinstance(error, CoserveError)
    return _failure(
        "job_refused", str(error) if is_expected else f"the job could not be started: {error!r}"
    )


def _failure(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param}
