"""What a modelled node is, and what it tells of the tasks on it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from coserve.cluster.view import NodeView, Placed, PlannedTask, Task


class Progress(NamedTuple):
    """Of a task on a node. first_token_s: when its first token came out, if this says so. end_s:
    when it ended, if this says so. path: as it was run, where the node has stages.
    """

    task: str
    first_token_s: float | None = None
    end_s: float | None = None
    path: PlannedTask | None = None


class Said(NamedTuple):
    """By a node, at a moment: progress of its tasks, and, if view is not None, how it is itself."""

    at_s: float
    progress: Sequence[Progress] = ()
    view: NodeView | None = None


class ModelledNode(Protocol):
    """A node in virtual time. Time does not go back: moments that it is given never fall."""

    @property
    def id(self) -> str: ...

    @property
    def next_s(self) -> float:
        """When something next happens here by itself; inf: nothing does."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of work that it has done, in the mean over its stages."""
        ...

    def add(self, task: Task, placed: Placed, now_s: float) -> list[Said]:
        """A task comes. Returns what it says to that."""
        ...

    def advance(self, now_s: float) -> list[Said]:
        """Let time pass until this moment, and what happens then happen. Returns what it says
        meanwhile, in order, and of what has begun and cannot be divided, what it will say at its
        end.
        """
        ...

    def report(self, now_s: float) -> NodeView:
        """How it is."""
        ...
