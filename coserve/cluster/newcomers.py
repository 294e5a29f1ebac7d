"""Engines that start while others serve what full fine-tuning has made: each takes in the same weights first."""

import asyncio
import logging
from collections.abc import Callable

from coserve.cluster.nodes import ClusterNode
from coserve.errors import CoserveError, EngineGoneError
from coserve.jobs.messages import JobStart
from coserve.jobs.records import AdapterRef

_log = logging.getLogger(__name__)


class Newcomers:
    """Belongs to one event loop."""

    def __init__(self, changed_by: Callable[[], JobStart | None]) -> None:
        """changed_by: see `ChangedWeights.changed_by`."""
        self._changed_by = changed_by
        self._taking: dict[str, asyncio.Task[None]] = {}  # by node

    def admit(self, node: ClusterNode, use: Callable[[], None]) -> None:
        """Use an engine that has just started: at once, or when it has the weights that the others have."""
        if (job := self._changed_by()) is None:
            use()
            return
        node.problem, node.is_refused = f"it reads the weights that job {job.id} has made", False
        self._taking[node.name] = asyncio.create_task(self._take(node, job, use))

    def gone(self, node: ClusterNode) -> None:
        """Its engine has died."""
        if (task := self._taking.pop(node.name, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Nothing waits any more."""
        for task in self._taking.values():
            task.cancel()

    async def _take(self, node: ClusterNode, job: JobStart, use: Callable[[], None]) -> None:
        try:
            await node.link.load_adapter(AdapterRef(name=job.name, directory=job.checkpoint), changed_by=job.id)
        except EngineGoneError:  # which is told with the node's end
            return
        except CoserveError as error:
            node.problem, node.is_refused = _problem(job, error), True
            _log.error("the node %s is not used: %s", node.name, node.problem)
            return
        del self._taking[node.name]
        by = self._changed_by()
        if by is not None and by.id == job.id:
            use()
        else:  # meanwhile the others have begun anew, or have others still
            await node.connection.end(0.0)


def _problem(job: JobStart, error: CoserveError) -> str:
    return (
        f"it has the weights that the model came with, job {job.id} has changed those of all other nodes, and what it "
        f"made ({job.name}) cannot be had here: {error}"
    )
