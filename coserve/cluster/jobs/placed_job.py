"""State of a job on one node of a cluster, or waiting for one: `apply(state, event)` returns the
next state, `plan(state)` the next action, which `coserve.cluster.jobs.placed_jobs` carries out.
Both are pure.
"""

from dataclasses import dataclass, replace
from typing import Literal

from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.jobs.lifecycle.events import DesiredState, RequestClosed
from coserve.jobs.messages import Checkpointed

# What the plan may say. An action that has been done is an event.
Action = Literal[
    "submit",  # queue the job for a node
    "withdraw",  # take it out of the queue, or from a node that was not sent the job
    "start",  # send it to its node
    "pause",  # tell its node
    "resume",
    "cancel",
    "park",  # have the node that it leaves write a checkpoint and pause it
    "leave",  # take the parked job from its node
    "forget",  # drop it: no node has it
]


@dataclass(frozen=True, kw_only=True)
class ChangeRequested:
    """The caller wants the job to run, rest, end, or move away from its node."""

    desired: DesiredState | Literal["move"]
    """State in which the caller wants the job."""
    keeps: bool = True
    """Whether a job that ends leaves a checkpoint."""


@dataclass(frozen=True)
class NodeAssigned:
    """The job has a node, which has not been sent the job yet."""

    node: ClusterNode
    """The job's node."""


@dataclass(frozen=True)
class CheckpointFailed:
    """The node could not write the checkpoint of the job that leaves it."""


Event = (
    Action
    | ChangeRequested
    | RequestClosed
    | NodeAssigned
    | CheckpointFailed
    | JobEvent
    | Checkpointed
)

# -- the state ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlacedJob:
    """A job that was started in the cluster, and is not over."""

    start: JobStart
    """Command with which the next node starts the job."""
    excluded: frozenset[str] = frozenset()
    """Nodes where the job cannot go."""
    requested: ChangeRequested | None = None
    """Request that is not done yet."""
    needs_node: bool = True
    """False while the job rests without a node."""
    is_waiting: bool = False
    """Whether the job is in the cluster's queue."""
    node: ClusterNode | None = None
    """The job's node; None while it waits for one, or rests without one."""
    is_sent: bool = False
    """Whether the node was sent the job."""
    is_parked: bool = False
    """Whether the node has paused the job, which leaves it."""
    can_move: bool = False
    """Whether a parked job's checkpoint has all of its steps."""
    is_lost: bool = False
    """Whether the job has left its node without a checkpoint of its last steps."""
    rests: bool = False
    """Whether the job is paused."""
    checkpoint: str | None = None
    """Directory of the newest checkpoint that was reported."""
    checkpoint_step: int = 0
    """Step of that checkpoint."""
    step: int = 0
    """Newest step that was reported."""

    @property
    def sent_to(self) -> ClusterNode | None:
        """The node that was sent the job: only this one can be asked about it."""
        return self.node if self.is_sent else None

    @property
    def is_kept(self) -> bool:
        """True if a checkpoint has all reported steps."""
        return self.step <= self.checkpoint_step


def apply(state: PlacedJob, event: Event) -> PlacedJob:
    """Return the state after an event."""
    match event:
        case ChangeRequested():
            return _requested(state, event)
        case RequestClosed():
            return replace(state, requested=None)
        case NodeAssigned(node=node):
            return replace(state, node=node, is_waiting=False)
        # The job leaves all the same; `can_move` stays False, so that `_left` marks it as lost.
        case CheckpointFailed():
            return replace(state, is_parked=True)
        case JobEvent(step=step):
            return replace(state, step=max(state.step, step))
        case Checkpointed(directory=directory, step=step):
            return replace(state, checkpoint=directory, checkpoint_step=step)
        case _:
            return _done(state, event)


def _done(state: PlacedJob, action: Action) -> PlacedJob:
    """Note an action that has been done."""
    match action:
        case "submit":
            return replace(state, is_waiting=True)
        case "withdraw":
            # A job that is to rest leaves the queue; one that is to move is queued again.
            rests = _wants(state, "rest")
            state = _paused(state, rests=rests or state.rests)
            return replace(state, node=None, is_waiting=False, needs_node=not rests, requested=None)
        case "start":
            return replace(state, is_sent=True)
        case "cancel":
            # Without a node that has it, the plan forgets the job.
            return replace(state, is_sent=False)
        case "pause" | "resume":
            return _paused(replace(state, requested=None), rests=action == "pause")
        case "park":
            return replace(state, is_parked=True, can_move=state.is_kept)
        case "leave":
            return _left(state)
        case "forget":
            return state


def _requested(state: PlacedJob, request: ChangeRequested) -> PlacedJob:
    """Note a request; one that needs no node's answer is done at once."""
    if request.desired == "run" and state.sent_to is None:
        return replace(_paused(state, rests=False), needs_node=True)
    if request.desired == "move" and state.node is None:
        return state
    return replace(state, requested=request, is_parked=False)


def _paused(state: PlacedJob, *, rests: bool) -> PlacedJob:
    # A node that starts the job later starts it in the same state.
    return replace(state, rests=rests, start=replace(state.start, paused=rests))


def _left(state: PlacedJob) -> PlacedJob:
    """Continue from the newest checkpoint on the next node, if that has all of the job's steps."""
    checkpoint = state.checkpoint or state.start.checkpoint
    return replace(
        state,
        start=replace(state.start, checkpoint=checkpoint, paused=state.rests),
        requested=None,
        node=None,
        is_sent=False,
        is_parked=False,
        is_lost=not state.can_move,
    )


def _wants(state: PlacedJob, desired: str) -> bool:
    return state.requested is not None and state.requested.desired == desired


# -- the plan -------------------------------------------------------------------------


def plan(state: PlacedJob) -> Action | None:
    """Return what brings the job one step nearer to what is requested; None: there is nothing to
    do, or only to wait.
    """
    if state.is_lost:
        return "forget"
    if state.requested is not None:
        if state.sent_to is None:
            return "forget" if _wants(state, "end") else "withdraw"
        match state.requested.desired:
            case "end":
                return "cancel"
            case "rest":
                return "pause"
            case "run":
                return "resume"
            case "move":
                return "leave" if state.is_parked else "park"
    if state.node is None:
        return "submit" if state.needs_node and not state.is_waiting else None
    return None if state.is_sent else "start"
