"""Base of placements: pure functions from a view of the cluster and a task to a node, with
settings.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coserve.cluster.queues import ArrivalQueue, TaskQueue
from coserve.cluster.view import ClusterTask, ClusterView, Decision, NodeView, Waits
from coserve.settings import HasSettings

# Seconds after which a node that can take a task may have come back, or joined.
_RETRY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PlacementPolicy(HasSettings, ABC):
    """A placement: a subclass in a file of its own in this folder, found by the file's name. Its
    fields are `coserve.settings.setting`s.

    `place` reads no clock, does no I/O and keeps nothing between calls: the same view and task give
    the same decision. Creating one raises ValueError with the name of a setting and its range.
    """

    kind: ClassVar[str] = "placement"
    """Kind of variant, for messages."""
    summary: ClassVar[str]
    """One line for help texts."""
    uses_prefixes: ClassVar[bool] = False
    """Whether it needs to know what is cached of a task's prefix, for which a front hashes every
    prompt.
    """

    def queue(self) -> TaskQueue:
        """Return an empty queue, in whose order tasks are placed; by arrival, unless a subclass
        says otherwise.
        """
        return ArrivalQueue()

    def order(self, view: ClusterView) -> Iterable[ClusterTask]:
        """Return the waiting tasks of a view in the order of this placement's queue."""
        queue = self.queue()
        for task in (*view.requests, *view.training):
            queue.add(task)
        return queue.order(view)

    def place(self, view: ClusterView, task: ClusterTask) -> Decision:
        """Return the node of a task, or how long it waits. A node that drains, or that the task
        excludes, is never chosen.
        """
        nodes = [
            node for node in view.nodes if not node.is_draining and node.id not in task.excluded
        ]
        if not nodes:
            return Waits(
                f"no node of {len(view.nodes)} can take it: they drain, or have failed it", _RETRY_S
            )
        return self.choose(view, task, nodes)

    @abstractmethod
    def choose(self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]) -> Decision:
        """Choose among these nodes, of which there is at least one, and all of which may take the
        task.
        """
