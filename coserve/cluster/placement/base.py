"""What a placement is: a pure function from a view of the cluster and a task to a node, with
settings of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coserve.cluster.queues import ArrivalQueue, TaskQueue
from coserve.cluster.view import ClusterTask, ClusterView, Decision, NodeView, Waits
from coserve.settings import HasSettings

# Where no node can take a task, one may have come back, or joined, after this many seconds.
_RETRY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PlacementPolicy(HasSettings, ABC):
    """A placement is a subclass in a file of its own in this folder, found by the file's name. Its
    fields are `coserve.settings.setting`s.

    `place` reads no clock, does no I/O and keeps nothing between calls: the same view and task give
    the same decision. ValueError when created names a setting and its range.
    """

    kind: ClassVar[str] = "placement"
    summary: ClassVar[str]  # one line, for help texts
    uses_prefixes: ClassVar[bool] = False
    """Whether it asks what is cached of a task's prefix: to know that, a front hashes every
    prompt."""

    def queue(self) -> TaskQueue:
        """What waiting tasks are kept in, in the order in which they are to be placed: as they
        came, unless a subclass says otherwise.
        """
        return ArrivalQueue()

    def order(self, view: ClusterView) -> Iterable[ClusterTask]:
        """The waiting tasks of a view, as a queue of this placement has them."""
        queue = self.queue()
        for task in (*view.requests, *view.training):
            queue.add(task)
        return queue.order(view)

    def place(self, view: ClusterView, task: ClusterTask) -> Decision:
        """Which node gets a task now, if any. A node that drains, or that the task excludes, never
        does.
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
        """Of these nodes, of which there is at least one, all of which may take the task."""
