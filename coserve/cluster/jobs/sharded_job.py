"""The state of a job that is divided among nodes, while the same nodes have it: `apply(state,
event)` is pure.

Each node has a shard; nodes are numbered as their shards. What the shards report is told as if one
node had the whole job: a step when all nodes have made it, and what the first one says of a step
(its checkpoint, the validation set's loss) after that, so that nothing is known of a step that may
be made again.

What nodes contribute stands in one order, in which each of them takes it in. A node contributes,
and then waits for what it is to take in: with a contribution that meets the others', until all have
made theirs; else at once what has come since it last took something in, its own contribution last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from coserve.engine.commands import JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.tuning.shard import Combination, DataParallel

Told = JobEvent | Checkpointed


@dataclass(frozen=True, kw_only=True)
class ShardReported:
    """A shard's node has reported something of it."""

    shard: int
    report: Told


@dataclass(frozen=True, kw_only=True)
class ShardContributed:
    """A shard's node has written what the others are to have."""

    shard: int
    contributed: Contributed


@dataclass(frozen=True, kw_only=True)
class RestChanged:
    """The job is to rest, or to run again."""

    rests: bool


@dataclass(frozen=True, kw_only=True)
class EndChanged:
    """The job is to end and not to be started again; or it could not be ended, and continues."""

    is_over: bool


Event = ShardReported | ShardContributed | RestChanged | EndChanged


@dataclass(frozen=True, kw_only=True)
class ShardedJob:
    """A job whose shards have been started, and what they have reported and contributed."""

    start: JobStart
    asked: DataParallel
    num_shards: int
    # In the ids of these shards, and of no others.
    attempt: str
    rests: bool = False
    # Whether the job will not be started again.
    is_over: bool = False
    # That the job was cancelled, which is told when all shards have ended.
    end: JobEvent | None = None
    # Directory of the newest checkpoint that was told.
    checkpoint: str | None = None

    # Steps that some nodes have made, and not all: what these have reported.
    steps: Mapping[int, tuple[JobEvent, ...]] = field(default_factory=dict)
    # Reports of the first node that wait for such steps.
    held: tuple[Told, ...] = ()
    # The newest version that each node serves, and the one that was told last.
    versions: Mapping[int, int] = field(default_factory=dict)
    last_version: int | None = None
    num_succeeded: int = 0

    # Contributions that not every node has taken in, and how many there were before those.
    contributions: tuple[Contributed, ...] = ()
    num_spent: int = 0
    # Contributions of nodes that wait for all others.
    meeting: Mapping[int, Contributed] = field(default_factory=dict)
    # By node: contributions that it has been told of, those that it has surely taken in, and those
    # that it has made.
    num_told: tuple[int, ...] = ()
    num_taken: tuple[int, ...] = ()
    num_made: tuple[int, ...] = ()
    # Steps that a node has made by its first contribution, its second one, and so forth.
    contribution_steps: tuple[int, ...] = ()

    @classmethod
    def begin(
        cls, start: JobStart, asked: DataParallel, *, num_shards: int, attempt: str
    ) -> "ShardedJob":
        """Return the state of a job whose shards have not reported anything."""
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
        """Whether a report waits until all nodes have come as far."""
        return bool(self.held)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state after an event, and what is to be done."""

    state: ShardedJob
    # Reports of the whole job, in this order.
    told: tuple[Told, ...] = ()
    # What nodes are to take in now, by shard.
    combinations: Mapping[int, Combination] = field(default_factory=dict)
    # Directories of contributions that no node reads any more.
    spent: tuple[str, ...] = ()


def apply(state: ShardedJob, event: Event) -> Outcome:
    """Return the state after an event, and what is to be done."""
    match event:
        case RestChanged(rests=rests):
            return Outcome(state=replace(state, rests=rests))
        case EndChanged(is_over=is_over):
            return Outcome(state=replace(state, is_over=is_over))
        case ShardContributed(shard=shard, contributed=contributed):
            return _contributed(state, shard, contributed)
        case ShardReported(shard=shard, report=report):
            state, told = _reported(state, shard, replace(report, job=state.id))
            return _told(state, told)


# -- reports --------------------------------------------------------------------------


def _told(state: ShardedJob, told: Sequence[Told]) -> Outcome:
    """Note what is known of the whole job now. An end that was asked for is told when all shards
    have ended.
    """
    for each in told:
        if isinstance(each, Checkpointed):
            state = replace(state, checkpoint=each.directory)
        elif each.kind == "cancelled" and state.is_over:
            state = replace(state, end=each)
        elif each.kind in ("failed", "cancelled"):
            state = replace(state, is_over=True)
    return Outcome(state=state, told=tuple(each for each in told if each is not state.end))


def _reported(state: ShardedJob, shard: int, report: Told) -> tuple[ShardedJob, Sequence[Told]]:
    """Take one shard's report; returns what is known of the whole job by it."""
    if isinstance(report, Checkpointed) or report.kind == "evaluation":
        return _released(replace(state, held=(*state.held, report)))
    if report.kind == "step":
        return _stepped(state, report)
    if report.kind == "version":
        return _published(state, shard, report)
    if report.kind == "succeeded":
        state = replace(state, num_succeeded=state.num_succeeded + 1)
        return state, [report] if state.num_succeeded == state.num_shards else []
    return state, [report] if report.kind == "failed" or (
        report.kind == "cancelled" and not shard
    ) else []


def _stepped(state: ShardedJob, report: JobEvent) -> tuple[ShardedJob, Sequence[Told]]:
    """Tell a step when all nodes have made it."""
    found = (*state.steps.get(report.step, ()), report)
    if len(found) < state.num_shards:
        return replace(state, steps={**state.steps, report.step: found}), []
    steps = {step: events for step, events in state.steps.items() if step != report.step}
    state, released = _released(replace(state, steps=steps))
    return state, [joint_step(found), *released]


def _released(state: ShardedJob) -> tuple[ShardedJob, Sequence[Told]]:
    """Tell what was held of steps that all nodes have made."""
    first = min(state.steps, default=inf)
    ready = [each for each in state.held if each.step < first]
    return replace(state, held=tuple(each for each in state.held if each.step >= first)), ready


def _published(
    state: ShardedJob, shard: int, report: JobEvent
) -> tuple[ShardedJob, Sequence[Told]]:
    """Tell the newest version that all nodes have, or have had."""
    name, _, step = (report.version or "").rpartition("@")
    state = replace(state, versions={**state.versions, shard: int(step)})
    newest = min(state.versions.values())
    if len(state.versions) < state.num_shards or newest == state.last_version:
        return state, []
    return replace(state, last_version=newest), [
        replace(report, version=f"{name}@{newest}", step=newest)
    ]


def joint_step(events: Sequence[JobEvent]) -> JobEvent:
    """Return one optimizer step of all nodes: means over the trained tokens of all, and what the
    slowest took.
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
    norms = [event.norm for event in events]
    return replace(
        events[-1],
        loss=mean([event.loss for event in trained]),
        token_accuracy=mean([event.token_accuracy for event in trained]),
        metrics={name: mean([event.metrics[name] for event in trained]) or 0.0 for name in names},
        num_trained=num_trained,
        num_tokens=sum(event.num_tokens for event in events),
        norm=None
        if None in norms
        else sum(norm for norm in norms if norm is not None) / len(norms),
        seconds=slowest.seconds,
    )


# -- contributions --------------------------------------------------------------------


def _contributed(state: ShardedJob, shard: int, contributed: Contributed) -> Outcome:
    """Put a contribution into the order of all; returns what nodes are to take in now."""
    made = _with(state.num_made, shard, state.num_made[shard] + 1)
    steps = state.contribution_steps
    state = replace(
        state,
        num_taken=_with(state.num_taken, shard, state.num_told[shard]),
        num_made=made,
        contribution_steps=(*steps, contributed.step) if made[shard] > len(steps) else steps,
    )
    if not contributed.meets:
        return _combined(replace(state, contributions=(*state.contributions, contributed)), [shard])
    meeting = {**state.meeting, shard: contributed}
    if len(meeting) < state.num_shards:
        return _without_spent(replace(state, meeting=meeting), {})
    met = tuple(meeting[each] for each in sorted(meeting))
    return _combined(
        replace(state, contributions=(*state.contributions, *met), meeting={}),
        range(state.num_shards),
    )


def _combined(state: ShardedJob, shards: Sequence[int]) -> Outcome:
    """Tell these nodes all that they have not been told of.

    As many contributions as all nodes make once are a version: each node that has taken in that
    many has the same.
    """
    now = state.num_spent + len(state.contributions)
    num_versions, rest = divmod(now, state.num_shards)
    combinations: dict[int, Combination] = {}
    for shard in shards:
        before = state.num_told[shard]
        found = state.contributions[before - state.num_spent :]
        num_in_version = now - rest - before
        combinations[shard] = Combination(
            directories=tuple(each.directory for each in found),
            num_trained=sum(each.num_trained for each in found),
            version=state.contribution_steps[num_versions - 1] if num_in_version > 0 else None,
            num_in_version=max(0, num_in_version),
        )
    told = tuple(
        now if shard in combinations else number for shard, number in enumerate(state.num_told)
    )
    return _without_spent(replace(state, num_told=told), combinations)


def _without_spent(state: ShardedJob, combinations: Mapping[int, Combination]) -> Outcome:
    """Let go of the contributions that every node has taken in."""
    number = min(state.num_taken) - state.num_spent
    spent = tuple(each.directory for each in state.contributions[:number])
    state = replace(
        state, contributions=state.contributions[number:], num_spent=state.num_spent + number
    )
    return Outcome(state=state, combinations=combinations, spent=spent)


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    """Replace one number."""
    return (*numbers[:index], number, *numbers[index + 1 :])
