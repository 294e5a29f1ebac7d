"""Planner of jobs: `plan(state)` is pure, and compares a job's actual state with its desired state.

The driver carries out the planned action, applies the events that follow, and plans again until
nothing is left to do. So a job comes from any state to the desired one, whatever happens meanwhile.
"""

from dataclasses import dataclass

from coserve.errors import CoserveError, EngineGoneError, JobError, JobOverError
from coserve.jobs.lifecycle.events import Command, DesiredState, EngineAnswered
from coserve.jobs.lifecycle.state import TRANSITIONS, EngineState, JobState
from coserve.jobs.records import OVER, JobStatus


@dataclass(frozen=True)
class ReadFiles:
    """An action: read and validate the job's files."""


@dataclass(frozen=True)
class RequestSlot:
    """An action: queue the job for a training slot."""


@dataclass(frozen=True)
class Start:
    """An action: start the job in the engine, from its newest checkpoint."""


@dataclass(frozen=True)
class SendCommand:
    """An action: send the engine a command about a job that it has."""

    command: Command
    """Verb to send."""


@dataclass(frozen=True)
class Write:
    """An action: write another status into the store."""

    status: JobStatus
    """The new status."""


Action = ReadFiles | RequestSlot | Start | SendCommand | Write

_LIVING: frozenset[JobStatus] = frozenset(TRANSITIONS) - OVER
_ANY_ENGINE: frozenset[EngineState] = frozenset(("absent", "running", "paused", "ended"))
_Rule = tuple[DesiredState, frozenset[JobStatus], frozenset[EngineState], Action | None]


def _rule(
    desired: DesiredState,
    status: JobStatus | None,
    engine: EngineState | None,
    action: Action | None,
) -> _Rule:
    """Make a rule; None matches any status, or any state in the engine."""
    return (
        desired,
        _LIVING if status is None else frozenset((status,)),
        _ANY_ENGINE if engine is None else frozenset((engine,)),
        action,
    )


# The first rule that fits decides.
_RULES: tuple[_Rule, ...] = (
    # A job that an engine has is cancelled there first; its record follows.
    _rule("end", None, "running", SendCommand("cancel")),
    _rule("end", None, "paused", SendCommand("cancel")),
    _rule("end", None, None, Write("cancelled")),
    # Paused in the engine, with a checkpoint, before it is paused on record.
    _rule("rest", None, "running", SendCommand("pause")),
    _rule("rest", "paused", None, None),
    _rule("rest", None, None, Write("paused")),
    _rule("run", "validating_files", None, ReadFiles()),
    _rule("run", None, "paused", SendCommand("resume")),
    # The engine was lost or has given the job up, which waits for the next start.
    _rule("run", "running", "absent", Write("queued")),
    _rule("run", "running", None, None),
    _rule("run", None, "running", Write("running")),
    _rule("run", "queued", "absent", Start()),
    # The outcome, or the last checkpoint, is still to be reported.
    _rule("run", "queued", "ended", None),
    _rule("run", "paused", None, Write("queued")),
)


def plan(state: JobState, *, can_start: bool) -> Action | None:
    """Return the action that brings a job one step nearer to its desired state; None: there is
    nothing to do, or the job has to wait.

    Args:
        state: The job.
        can_start: Whether an engine is up and all announced events about the job have been applied.
    """
    if state.status in OVER:
        return None
    # Until the engine has let go of a failed job, `desired` is "end" and cancels it there.
    if state.failure is not None and state.engine in ("absent", "ended"):
        return Write("failed")
    # Before requests and open commands: finished work succeeds, whatever was requested since.
    if state.has_succeeded and state.has_last_checkpoint:
        return Write("succeeded")
    if state.pending is not None:
        return None
    # The job was paused before its files had been read.
    if state.status == "paused" and state.desired == "run" and not state.job.validated:
        return Write("validating_files")
    return _when_possible(_rule_for(state), state, can_start)


def _rule_for(state: JobState) -> Action | None:
    for desired, statuses, engines, action in _RULES:
        if state.desired == desired and state.status in statuses and state.engine in engines:
            return action
    raise AssertionError(f"no rule for {state.desired}, {state.status}, {state.engine}")


def _when_possible(action: Action | None, state: JobState, can_start: bool) -> Action | None:
    """Return the action, or what comes first while the job lacks a model, a slot or an engine."""
    if isinstance(action, ReadFiles):
        return action if state.has_model and not state.is_reading else None
    if action not in (Start(), SendCommand("resume")):
        return action
    if state.slot != "held":
        if state.has_model and state.slot == "none":
            return RequestSlot()
        # A resumed job that waits for a slot is on record as queued.
        return Write("queued") if state.status == "paused" else None
    # A resume goes to the engine that has the job; only a start needs an engine that is up.
    return action if can_start or action != Start() else None


def refusal(state: JobState, answer: EngineAnswered, *, is_current: bool) -> CoserveError | None:
    """Return the error for the client whose command failed, if the job is to be left as it is.

    Without a refusal the plan would send the same command for ever. None: the job is planned again.

    Args:
        state: The job before the answer.
        answer: The answer to the job's pending command.
        is_current: Whether no engine that had the job is known to have died since the command was
            sent.
    """
    error, command = answer.error, answer.command
    if isinstance(error, EngineGoneError):
        return error if is_current else None  # after a death, the job waits for the next engine
    if (
        # These change the state when they are applied, so that the plan moves on by itself.
        error is None
        or isinstance(error, JobOverError)
        or command.command == "start"
        or command.epoch != state.epoch
    ):
        return None
    return JobError(f"The engine could not do this with job {state.id}: {error}")


def event_message(state: JobState, status: JobStatus) -> str | None:
    """Return the text of the job's event that goes with a new status; None: there is no event."""
    if status == "paused":
        return "Fine-tuning job paused"
    if status in ("queued", "validating_files"):
        return "Fine-tuning job resumed" if state.status == "paused" else None
    assert status == "running", "an end has its own events"
    if state.was_resumed:  # the resumption of a job that waited for a slot has its event already
        return (
            "Fine-tuning job resumed"
            if state.status == "paused"
            else _resuming(state.job.num_steps_done)
        )
    return _resuming(state.resumed_step) if state.resumed_step else "Fine-tuning job started"


def _resuming(step: int) -> str:
    return f"Fine-tuning resumes from step {step}"
