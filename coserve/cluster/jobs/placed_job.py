"""The state of a job that is on a node of a cluster, or waits for one: `apply(state, event)` is
pure.
"""

from dataclasses import dataclass, replace

from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import JobStart


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The job has a node."""

    node: ClusterNode


@dataclass(frozen=True, kw_only=True)
class StartAwaited:
    """The caller that started the job has been answered before the job had a node."""


@dataclass(frozen=True, kw_only=True)
class StartSent:
    """The job's node is told to start it."""


@dataclass(frozen=True, kw_only=True)
class TakenBack:
    """The job has no node any more, and waits for none."""


@dataclass(frozen=True, kw_only=True)
class RestChanged:
    """The job is paused, or is to run again."""

    rests: bool


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The job's node has let go of it: it continues on another one, from its newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StepTold:
    """The job's node has reported how far the job is."""

    step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointTold:
    """A checkpoint of the job is on disk."""

    directory: str
    step: int


Event = (
    Placed | StartAwaited | StartSent | TakenBack | RestChanged | Moved | StepTold | CheckpointTold
)


@dataclass(frozen=True, kw_only=True)
class PlacedJob:
    """A job that was started in the cluster, and is not over."""

    # With which the next node starts it.
    start: JobStart
    # Nodes where the job cannot go.
    excluded: frozenset[str] = frozenset()
    # None: the job waits for a node, or is paused without one.
    node: ClusterNode | None = None
    # Whether the node is told of the job.
    is_sent: bool = False
    # Whether the caller that started the job has been answered before the job had a node: errors
    # are events then.
    is_late: bool = False
    # Whether the job is paused.
    rests: bool = False
    # The newest checkpoint, and its step: 0 until one is told.
    checkpoint: str | None = None
    checkpoint_step: int = 0
    # The newest step that was told.
    step: int = 0

    @property
    def told(self) -> ClusterNode | None:
        """The node that is told of the job: no other can be asked anything of it."""
        return self.node if self.is_sent else None

    @property
    def is_kept(self) -> bool:
        """Whether a checkpoint has all steps that are known."""
        return self.step <= self.checkpoint_step


def apply(state: PlacedJob, event: Event) -> PlacedJob:
    """Return the state after an event."""
    match event:
        case Placed(node=node):
            return replace(state, node=node)
        case StartAwaited():
            return replace(state, is_late=True)
        case StartSent():
            return replace(state, is_sent=True)
        case TakenBack():
            return replace(state, node=None, is_sent=False)
        case RestChanged(rests=rests):
            return replace(state, rests=rests, start=replace(state.start, paused=rests))
        case Moved():
            checkpoint = state.checkpoint or state.start.checkpoint
            start = replace(state.start, checkpoint=checkpoint, paused=state.rests)
            return replace(state, start=start, is_late=False)
        case StepTold(step=step):
            return replace(state, step=max(state.step, step))
        case CheckpointTold(directory=directory, step=step):
            return replace(state, checkpoint=directory, checkpoint_step=step)
