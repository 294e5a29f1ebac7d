"""State of a job that is divided among nodes, while the same nodes have it: `apply(state, event)`
returns the next state, `plan(state, nodes)` the next action. Both are pure.

Each node has a shard; nodes are numbered as their shards. Reports of shards become reports of the
whole job: a step when all nodes have made it, and what the first node reports of a step (its
checkpoint, the loss of the validation set) after that, so that nothing is known of a step that may
be made again.

Contributions of nodes stand in one order, in which each node takes them in. A node contributes, and
then waits for what it is to take in: after a contribution that meets the others', until all have
made theirs; else at once what has come since it last took something in, its own contribution last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, get_args

from coserve.cluster.jobs.placed_job import ChangeRequested
from coserve.engine.commands import JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.jobs.lifecycle.events import DesiredState, RequestClosed
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.tuning.shard import Combination, DataParallel

JobReport = JobEvent | Checkpointed

# -- actions; one that has been done is an event ----------------------------------------


@dataclass(frozen=True)
class Report:
    """Report this of the whole job."""

    report: JobReport
    """An event or a checkpoint of the whole job."""


@dataclass(frozen=True)
class Combine:
    """Have a shard take in contributions."""

    shard: int
    """Number of the shard."""
    combination: Combination
    """Contributions that the shard takes in."""


@dataclass(frozen=True)
class Discard:
    """Remove the directories of contributions that no node reads any more."""

    directories: tuple[str, ...]
    """Paths of the directories."""


# What takes time, and is waited for.
_Slow = Literal[
    "start first",  # start the first shard
    "await starts",  # until nodes have read what their shards begin with, but not for long
    "pause first",  # pause the first shard, with a checkpoint
    "await reports",  # until all nodes have come as far as that checkpoint, but not for long
    "pause others",
    "resume",
    "cancel",
    "regroup",  # leave, and have the job start again on the nodes that there are
]
SLOW: tuple[str, ...] = get_args(_Slow)
Action = (
    Report
    | Combine
    | Discard
    | Literal[
        "start next",  # start one more shard, on a node of its own
        "leave",  # take all shards from their nodes, without checkpoints
        "finish",  # drop the job, which has succeeded
    ]
    | _Slow
)

# -- other events -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShardReported:
    """A shard's node has reported something of it."""

    shard: int
    """Number of the shard."""
    report: JobReport
    """An event or a checkpoint of the shard."""


@dataclass(frozen=True, kw_only=True)
class ShardContributed:
    """A shard's node has written its contribution for the other nodes."""

    shard: int
    """Number of the shard."""
    contributed: Contributed
    """What the node has written, and where."""


@dataclass(frozen=True)
class StartRefused:
    """The first shard's node has refused it."""


Event = Action | ShardReported | ShardContributed | StartRefused | ChangeRequested | RequestClosed

# -- the state ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShardedJob:
    """A job that is divided into shards, and what these have reported and contributed."""

    start: JobStart
    """Command that started the whole job."""
    asked: DataParallel
    """How the job is divided."""
    num_shards: int
    """Number of shards, each of which has a node of its own."""
    attempt: str
    """Part of the ids of these shards, and of no others."""

    requested: DesiredState | Literal["move"] | None = None
    """Request that is not done yet."""
    num_started: int = 0
    """Number of shards that have been started, the first ones."""
    num_done: int = 0
    """Number of actions that have been done for this request."""
    rests: bool = False
    """Whether the job is paused, or about to be."""
    is_over: bool = False
    """Whether the job will not be started again."""
    has_left: bool = False
    """Whether the shards have left their nodes."""
    end: JobEvent | None = None
    """Report that the job was cancelled, which is passed on when all shards have ended."""
    checkpoint: str | None = None
    """Directory of the newest checkpoint that was reported of the whole job."""
    due: tuple[Report | Combine | Discard, ...] = ()
    """Actions that follow from reports and contributions, in order."""

    steps: Mapping[int, tuple[JobEvent, ...]] = field(default_factory=dict)
    """Reports of the steps that some nodes have made, and not all."""
    held: tuple[JobReport, ...] = ()
    """Reports of the first node that wait for such steps."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """The newest version that each node serves."""
    last_version: int | None = None
    """The version that was reported last of the whole job."""
    num_succeeded: int = 0
    """Number of shards that have succeeded."""

    contributions: tuple[Contributed, ...] = ()
    """Contributions that not every node has taken in."""
    num_spent: int = 0
    """Number of contributions before those."""
    meeting: Mapping[int, Contributed] = field(default_factory=dict)
    """Contributions of nodes that wait for all others."""
    num_told: tuple[int, ...] = ()
    """By node, the number of contributions that it was told to take in."""
    num_taken: tuple[int, ...] = ()
    """By node, the number of contributions that it has surely taken in."""
    num_made: tuple[int, ...] = ()
    """By node, the number of contributions that it has made."""
    contribution_steps: tuple[int, ...] = ()
    """Steps that a node has made by its first contribution, its second one, and so forth."""

    @classmethod
    def begin(
        cls, start: JobStart, asked: DataParallel, *, num_shards: int, attempt: str
    ) -> "ShardedJob":
        """Return the state of a job none of whose shards has been started."""
        zeros = (0,) * num_shards
        return cls(
            start=start,
            asked=asked,
            num_shards=num_shards,
            attempt=attempt,
            rests=start.paused,
            checkpoint=start.checkpoint,
            num_told=zeros,
            num_taken=zeros,
            num_made=zeros,
        )

    @property
    def id(self) -> str:
        """The job's id."""
        return self.start.id

    @property
    def shards(self) -> list[str]:
        """Ids of the shards, in their order."""
        return [f"{self.id}.{self.attempt}.{number}" for number in range(self.num_shards)]

    @property
    def is_holding(self) -> bool:
        """True while a report waits until all nodes have come as far."""
        return bool(self.held)


# -- the plan -------------------------------------------------------------------------

# All shards rest with the checkpoint of the first one, as far as which the others come before they
# rest, too. Where that is of the step that all begin at, it takes the place of the one that they
# read then: so they must have read it.
_RESTING: tuple[Action, ...] = ("await starts", "pause first", "await reports", "pause others")
# What is done for a request that the job continues after, in order.
_ACTIONS: dict[str | None, tuple[Action, ...]] = {
    None: (),
    "run": ("resume",),
    "rest": _RESTING,
    "move": (*_RESTING, "regroup"),
}


def plan(state: ShardedJob, nodes: Sequence[str | None]) -> Action | None:
    """Return what is to be done next; None: nothing, or only to wait.

    Args:
        state: The job.
        nodes: Names of the shards' nodes; None for a shard that has none yet.
    """
    if state.due:
        return state.due[0]
    if state.has_left:
        return None
    if state.num_succeeded == state.num_shards:
        return "finish"
    if state.requested == "end":
        return "cancel"
    if state.is_over:
        return "leave"
    if not state.num_started:
        return "start first"
    # No two shards go to one node: a shard is started when those before it have theirs.
    if state.num_started < state.num_shards and None not in nodes[: state.num_started]:
        return "start next"
    actions = _ACTIONS[state.requested]
    return actions[state.num_done] if state.num_done < len(actions) else None


# -- events ---------------------------------------------------------------------------


def apply(state: ShardedJob, event: Event) -> ShardedJob:
    """Return the state after an event."""
    match event:
        case ChangeRequested(desired=desired):
            rests = state.rests and desired != "run"
            return replace(state, requested=desired, num_done=0, rests=rests)
        case RequestClosed():
            return replace(state, requested=None)
        case StartRefused():
            return replace(state, is_over=True)
        case ShardContributed(shard=shard, contributed=contributed):
            return _contributed(state, shard, contributed)
        case ShardReported(shard=shard, report=report):
            state, reports = _reported(state, shard, replace(report, job=state.id))
            return _passed_on(state, reports)
        case _:
            return _done(state, event)


def _done(state: ShardedJob, action: Action) -> ShardedJob:
    """Note an action that has been done."""
    match action:
        case Report() | Combine() | Discard():
            return replace(state, due=state.due[1:])
        case "start first" | "start next":
            return replace(state, num_started=state.num_started + 1)
        case "cancel":
            return replace(state, is_over=True, has_left=True)
        case "await starts":
            return replace(state, num_done=1, rests=True)
        case "leave" | "regroup" | "finish":
            return replace(state, has_left=True)
        case _:
            return replace(state, num_done=state.num_done + 1)


# -- reports --------------------------------------------------------------------------


def _passed_on(state: ShardedJob, reports: Sequence[JobReport]) -> ShardedJob:
    """Pass on what is known of the whole job now. An end that was requested is passed on when all
    shards have ended.
    """
    for report in reports:
        if isinstance(report, Checkpointed):
            state = replace(state, checkpoint=report.directory)
        elif report.kind == "cancelled" and state.requested == "end":
            state = replace(state, end=report)
            continue
        elif report.kind in ("failed", "cancelled"):
            state = replace(state, is_over=True)
        state = replace(state, due=(*state.due, Report(report)))
    return state


def _reported(
    state: ShardedJob, shard: int, report: JobReport
) -> tuple[ShardedJob, Sequence[JobReport]]:
    """Take one shard's report; returns the reports of the whole job that follow."""
    if isinstance(report, Checkpointed) or report.kind == "evaluation":
        return _released(replace(state, held=(*state.held, report)))
    if report.kind == "step":
        return _stepped(state, report)
    if report.kind == "version":
        return _published(state, shard, report)
    if report.kind == "succeeded":
        state = replace(state, num_succeeded=state.num_succeeded + 1)
        return state, [report] if state.num_succeeded == state.num_shards else []
    is_whole = report.kind == "failed" or (report.kind == "cancelled" and shard == 0)
    return state, [report] if is_whole else []


def _stepped(state: ShardedJob, report: JobEvent) -> tuple[ShardedJob, Sequence[JobReport]]:
    """Report a step when all nodes have made it."""
    events = (*state.steps.get(report.step, ()), report)
    if len(events) < state.num_shards:
        return replace(state, steps={**state.steps, report.step: events}), []
    steps = {step: others for step, others in state.steps.items() if step != report.step}
    state, released = _released(replace(state, steps=steps))
    return state, [joint_step(events), *released]


def _released(state: ShardedJob) -> tuple[ShardedJob, Sequence[JobReport]]:
    """Release the held reports of steps that all nodes have made."""
    # The oldest step that some node has still to make.
    first = min(state.steps, default=inf)
    ready = [report for report in state.held if report.step < first]
    held = tuple(report for report in state.held if report.step >= first)
    return replace(state, held=held), ready


def _published(
    state: ShardedJob, shard: int, report: JobEvent
) -> tuple[ShardedJob, Sequence[JobReport]]:
    """Report the newest version that all nodes have, or have had."""
    # Versions are named "adapter@step".
    name, _, step = (report.version or "").rpartition("@")
    state = replace(state, versions={**state.versions, shard: int(step)})
    newest = min(state.versions.values())
    if len(state.versions) < state.num_shards or newest == state.last_version:
        return state, []
    version = replace(report, version=f"{name}@{newest}", step=newest)
    return replace(state, last_version=newest), [version]


def joint_step(events: Sequence[JobEvent]) -> JobEvent:
    """Return one optimizer step of all nodes: means over the trained tokens of all, and the seconds
    of the slowest.
    """
    trained = [event for event in events if event.num_trained]
    num_trained = sum(event.num_trained for event in trained)

    def mean(values: Sequence[float | None]) -> float | None:
        pairs = [
            (value, event.num_trained)
            for value, event in zip(values, trained, strict=True)
            if value is not None
        ]
        return sum(value * number for value, number in pairs) / num_trained if pairs else None

    names = trained[0].metrics if trained else ()
    slowest = max(events, key=lambda event: event.seconds.forward_s + event.seconds.backward_s)
    norms = [event.norm for event in events if event.norm is not None]
    return replace(
        events[-1],
        loss=mean([event.loss for event in trained]),
        token_accuracy=mean([event.token_accuracy for event in trained]),
        metrics={name: mean([event.metrics[name] for event in trained]) or 0.0 for name in names},
        num_trained=num_trained,
        num_tokens=sum(event.num_tokens for event in events),
        # A node without a norm had a gradient that is not finite.
        norm=sum(norms) / len(norms) if len(norms) == len(events) else None,
        seconds=slowest.seconds,
    )


# -- contributions --------------------------------------------------------------------


def _contributed(state: ShardedJob, shard: int, contributed: Contributed) -> ShardedJob:
    """Put a contribution into the order of all, and have nodes take in what they can now."""
    made = _with(state.num_made, shard, state.num_made[shard] + 1)
    steps = state.contribution_steps
    state = replace(
        state,
        # A node contributes only after it has taken in what it was told to.
        num_taken=_with(state.num_taken, shard, state.num_told[shard]),
        num_made=made,
        contribution_steps=(*steps, contributed.step) if made[shard] > len(steps) else steps,
    )
    if not contributed.meets:
        state = replace(state, contributions=(*state.contributions, contributed))
        return _without_spent(_combined(state, range(shard, shard + 1)))
    meeting = {**state.meeting, shard: contributed}
    if len(meeting) < state.num_shards:
        return _without_spent(replace(state, meeting=meeting))
    met = tuple(meeting[number] for number in range(state.num_shards))
    state = replace(state, contributions=(*state.contributions, *met), meeting={})
    return _without_spent(_combined(state, range(state.num_shards)))


def _combined(state: ShardedJob, shards: range) -> ShardedJob:
    """Have these shards take in all that they have not been told to.

    As many contributions as all nodes make once are a version: each node that has taken in that
    many has the same.
    """
    now = state.num_spent + len(state.contributions)
    num_versions, rest = divmod(now, state.num_shards)
    for shard in shards:
        before = state.num_told[shard]
        # Those before number now - rest complete a version; the last `rest` begin another one.
        news = state.contributions[before - state.num_spent :]
        num_in_version = now - rest - before
        combination = Combination(
            directories=tuple(contributed.directory for contributed in news),
            num_trained=sum(contributed.num_trained for contributed in news),
            version=state.contribution_steps[num_versions - 1] if num_in_version > 0 else None,
            num_in_version=max(0, num_in_version),
        )
        state = replace(
            state,
            num_told=_with(state.num_told, shard, now),
            due=(*state.due, Combine(shard, combination)),
        )
    return state


def _without_spent(state: ShardedJob) -> ShardedJob:
    """Discard the contributions that every node has taken in."""
    number = min(state.num_taken) - state.num_spent
    if not number:
        return state
    spent = tuple(contributed.directory for contributed in state.contributions[:number])
    return replace(
        state,
        contributions=state.contributions[number:],
        num_spent=state.num_spent + number,
        due=(*state.due, Discard(spent)),
    )


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])
