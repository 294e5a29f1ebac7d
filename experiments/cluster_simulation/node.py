"""Interface of a modelled node, and its reports."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from coserve.cluster.view import ClusterTask, NodeView, Placed, PlannedTask


class Progress(NamedTuple):
    """Progress of a task on a node."""

    task: str
    """Id of the task."""
    first_token_s: float | None = None
    """Time of the first token, if this report is of it."""
    end_s: float | None = None
    """Time of the end, if this report is of it."""
    path: PlannedTask | None = None
    """Times of the task's passes, on a node with stages."""


class ModelledReport(NamedTuple):
    """A report of a node."""

    at_s: float
    """Time of the report."""
    progress: Sequence[Progress] = ()
    """Progress of its tasks."""
    view: NodeView | None = None
    """State of the node, if the report has it."""


class ModelledNode(Protocol):
    """A node in virtual time; the times that it is given never decrease."""

    @property
    def id(self) -> str: ...

    @property
    def next_s(self) -> float:
        """Return the time of the next event on the node; inf: there is none."""
        ...

    @property
    def busy_s(self) -> float:
        """Return the seconds of work that it has done, in the mean over its stages."""
        ...

    def add(self, task: ClusterTask, placed: Placed, now_s: float) -> list[ModelledReport]:
        """Add a task, and return the reports about it."""
        ...

    def advance(self, now_s: float) -> list[ModelledReport]:
        """Advance to a time, and return the reports until then, in order.

        Work that has begun and cannot be divided is reported with its end.
        """
        ...

    def report(self, now_s: float) -> NodeView:
        """Return the state of the node."""
        ...
