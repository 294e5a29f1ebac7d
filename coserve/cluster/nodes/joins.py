"""Engines that have just started: each is used when it sees the files that the front sees, and has
what the engines have that are used: the weights that full fine-tuning has made, and the adapters
that clients have loaded.

One that cannot be used now is asked again: files may come to be where they should, and adapters be
unloaded.
"""

import asyncio
import logging
from collections.abc import Callable

from coserve.cluster.nodes.adapters import ClusterAdapters
from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.nodes.registry import ClusterNode
from coserve.engine.commands import AdapterRef, JobStart
from coserve.errors import ClusterError, CoserveError, EngineGoneError

_log = logging.getLogger(__name__)

# Before one is asked again.
_RETRY_S = 2.0


class NodeJoins:
    """Belongs to one event loop."""

    def __init__(
        self,
        changed_by: Callable[[], JobStart | None],
        adapters: ClusterAdapters,
        checks: NodeChecks,
    ) -> None:
        """changed_by: see `ChangedWeights.changed_by`."""
        self._changed_by, self._adapters, self._checks = changed_by, adapters, checks
        self._taking: dict[str, asyncio.Task[None]] = {}  # by node

    def admit(self, node: ClusterNode, use: Callable[[], None]) -> None:
        """Use an engine that has just started: at once, or when it has what the others have."""
        if self._changed_by() is None and not self._adapters and not self._checks.looks_at_files:
            use()
            return
        node.problem, node.is_refused = "it takes in what the others have", False
        self._taking[node.name] = asyncio.create_task(self._take_in(node, use))

    def gone(self, node: ClusterNode) -> None:
        """Its engine has died."""
        if (task := self._taking.pop(node.name, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Nothing waits any more."""
        for task in self._taking.values():
            task.cancel()

    async def _take_in(self, node: ClusterNode, use: Callable[[], None]) -> None:
        try:
            if await self._prepare(node):
                use()
                del self._taking[node.name]
                return
        except Exception:
            _log.exception("the node %s cannot be used; it begins anew", node.name)
            await asyncio.sleep(_RETRY_S)
        del self._taking[node.name]
        await node.connection.end(0.0)

    async def _prepare(self, node: ClusterNode) -> bool:
        """Until it has all; or, False, what it has is of no use any more: it is to begin anew."""
        weights, adapters = "", set[str]()  # the job that has made them; names
        while True:
            job = self._changed_by()
            if (adapters or weights) and weights != _id(job):
                return False  # meanwhile the others have begun anew, or have others still
            try:
                if (unseen := await self._checks.unseen(node.calls)) is not None:
                    raise ClusterError(unseen)
                if job is not None and not weights:
                    await _take_weights(node, job)
                    weights = job.id
                await self._adapters.bring(node, adapters)
            except (CoserveError, TimeoutError) as error:
                self._refuse(node, error)
                await self._adapters.wait(_RETRY_S)
                continue
            if weights == _id(self._changed_by()):
                return True

    def _refuse(self, node: ClusterNode, error: Exception) -> None:
        problem, does_answer = (
            str(error) or "it does not answer",
            not isinstance(error, EngineGoneError | TimeoutError),
        )
        if does_answer and (problem, True) != (node.problem, node.is_refused):
            _log.error("the node %s is not used: %s", node.name, problem)
        node.problem, node.is_refused = problem, does_answer


def _id(job: JobStart | None) -> str:
    return "" if job is None else job.id


async def _take_weights(node: ClusterNode, job: JobStart) -> None:
    """Those that the others have."""
    try:
        await node.link.load_adapter(
            AdapterRef(name=job.name, directory=job.checkpoint), changed_by=job.id
        )
    except EngineGoneError:
        raise
    except CoserveError as error:
        raise ClusterError(
            f"it has the weights that the model came with, job {job.id} has changed those of all "
            f"other nodes, and what "
            f"it made ({job.name}) cannot be had here: {error}"
        ) from error
