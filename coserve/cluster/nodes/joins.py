"""Joins of nodes: an engine that has just started is used when it sees the files that the front
sees, and has what the other engines have: the weights that full fine-tuning has made, and the
adapters that clients have loaded.

An engine that cannot be used now is tried again: files may appear, and adapters be unloaded.
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

# Wait before a node is tried again.
_RETRY_S = 2.0


class NodeJoins:
    """Nodes that are joining. Belongs to one event loop."""

    def __init__(
        self,
        changed_by: Callable[[], JobStart | None],
        adapters: ClusterAdapters,
        checks: NodeChecks,
    ) -> None:
        """Begin without nodes.

        Args:
            changed_by: `ChangedWeights.changed_by`.
            adapters: Adapters that a node needs.
            checks: Checks that a node has to pass.
        """
        self._changed_by = changed_by
        self._adapters = adapters
        self._checks = checks
        self._taking: dict[str, asyncio.Task[None]] = {}  # by node

    def admit(self, node: ClusterNode, use: Callable[[], None]) -> None:
        """Use an engine that has just started: at once, or when it has what the others have."""
        if self._changed_by() is None and not self._adapters and not self._checks.looks_at_files:
            use()
            return
        node.problem, node.is_refused = "it takes in what the others have", False
        self._taking[node.name] = asyncio.create_task(self._take_in(node, use))

    def gone(self, node: ClusterNode) -> None:
        """Stop preparing a node whose engine has died."""
        if (task := self._taking.pop(node.name, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Stop preparing nodes."""
        for task in self._taking.values():
            task.cancel()

    async def _take_in(self, node: ClusterNode, use: Callable[[], None]) -> None:
        try:
            if await self._prepare(node):
                use()
                del self._taking[node.name]
                return
        except Exception:
            _log.exception("the node %s cannot be used; its engine restarts", node.name)
            await asyncio.sleep(_RETRY_S)
        del self._taking[node.name]
        # The next session begins with a fresh engine, which has the model's own weights.
        await node.connection.end(0.0)

    async def _prepare(self, node: ClusterNode) -> bool:
        """Prepare a node until it has all, and return True; or False if what it has is outdated, so
        that its engine has to restart.
        """
        # The job whose weights the node has loaded, and names of the adapters that it has.
        weights, adapters = "", set[str]()
        while True:
            job = self._changed_by()
            if (adapters or weights) and weights != _id(job):
                return False  # the others have restarted meanwhile, or have other weights
            try:
                if (unseen := await self._checks.unseen(node.calls)) is not None:
                    raise ClusterError(unseen)
                if job is not None and not weights:
                    await _take_weights(node, job)
                    weights = job.id
                await self._adapters.load_on(node, adapters)
            except (CoserveError, TimeoutError) as error:
                self._refuse(node, error)
                await self._adapters.wait(_RETRY_S)
                continue
            # A job may have succeeded while adapters were being loaded.
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
    """Have a node load the weights that the others have."""
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
            f"it made ({job.name}) cannot be loaded here: {error}"
        ) from error
