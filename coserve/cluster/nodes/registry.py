"""The nodes of a cluster as its front sees them: found, asked for their status, attached, left."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.nodes.connection import NodeConnection
from coserve.cluster.nodes.messages import NodeCalls, NodeStatus
from coserve.cluster.nodes.tracker import NodeTracker
from coserve.engine_client.link import EngineLink
from coserve.engine_client.streams import RequestStream
from coserve.engine_client.supervisor import EngineOwner
from coserve.errors import CoserveError, EngineGoneError
from coserve.protocol.messages import Ready, StepReport
from coserve.version import VERSION

_log = logging.getLogger(__name__)

# Time for a node to answer with its status.
_DESCRIBE_S = 10.0

# Prefix of nodes' names.
NODE = "node-"

# A machine, and the id of a process there.
_Process = tuple[str | None, int]
# Returns all nodes of the cluster, by name.
FindNodes = Callable[[], Awaitable[Mapping[str, NodeCalls]]]


def node_names(existing: Collection[str], num_devices: int) -> list[str]:
    """Return the names of existing nodes, and new names as long as there are more devices than
    nodes.

    There may be fewer devices: a machine that has died is counted for some seconds beside its
    replacement, whose device then gets a node of a new name, while the node of the old machine
    waits for another device. So a front cannot tell from numbers in names which nodes work.
    """
    names = list(existing)
    fresh = (f"{NODE}{number}" for number in count())
    while len(names) < num_devices:
        names.append(next(name for name in fresh if name not in existing))
    return names


@dataclass(kw_only=True, eq=False)
class ClusterNode:
    """A node that was found."""

    name: str
    """Its name, which a node in its place keeps."""
    calls: NodeCalls
    """Its calls."""
    link: EngineLink
    """The link to its engine."""
    connection: NodeConnection
    """The connection under this link."""
    running: "asyncio.Task[None] | None" = None
    """Task that keeps the connection; None until the node is attached."""
    asking: "asyncio.Task[None] | None" = None
    """Task that asks for its status."""
    tracker: NodeTracker | None = None
    """Statistics of its engine; None unless the engine is used."""
    num_engines: int = 0
    """Number of its engines that have been used until now."""
    status: NodeStatus | None = None
    """The newest status; None until the node has answered."""
    status_of: int = 0
    """`num_engines` when this status was asked for."""
    problem: str | None = None
    """Why the node is not used, in one line."""
    is_refused: bool = False
    """Whether it will not be used as it is."""
    is_draining: bool = False
    """Whether it gets no more tasks, until its process is another than `draining_process`."""
    draining_process: _Process | None = None
    """The process that drains; None as long as it is not known, since the status is older than the
    engine.
    """
    draining_engine: int = 0
    """`num_engines` when the node began to drain."""
    lost: list[str] = field(default_factory=list)
    """Requests of an engine that has died, until its death is handled."""

    def drain(self) -> None:
        """Begin to drain; no error if the node drains already."""
        if not self.is_draining:
            self.is_draining = True
            self.draining_engine = self.num_engines
            is_known = self.status is not None and self.status_of == self.num_engines
            self.draining_process = _process_of(self.status) if is_known else None

    def update_status(self, status: NodeStatus, engine: int) -> None:
        """Take in a status that was asked for when `num_engines` was `engine`."""
        is_first, self.status, self.status_of = self.status is None, status, engine
        if self.draining_process is None and engine < self.draining_engine:
            return  # the status is older than the request to drain
        # The first status that belongs to the draining engine tells which process drains.
        if self.draining_process is None and (
            is_first or (engine == self.draining_engine and self.tracker is not None)
        ):
            self.draining_process = _process_of(status)
        elif self.draining_process != _process_of(status):
            self.is_draining = False  # it left, and has come back

    def describe(self, *, num_requests: int, jobs: list[str]) -> dict[str, Any]:
        """Return the node's state as JSON. jobs: ids that clients know."""
        status, stats = self.status, None if self.tracker is None else self.tracker.stats
        return {
            "name": self.name,
            "state": "draining"
            if self.is_draining
            else "ready"
            if self.tracker is not None
            else "not ready",
            "problem": self.problem,
            "refused": self.problem if self.is_refused else None,
            "host": None if status is None else status.host,
            "machine": None if status is None else status.machine,
            "pid": None if status is None else status.pid,
            "device": None if status is None else status.device,
            "restarts": None if status is None else status.num_restarts,
            "requests": num_requests,
            "jobs": jobs,
            "steps": None if stats is None else stats.num_steps,
            "pages": None if stats is None else stats.num_pages,
            "free_pages": None if stats is None else stats.num_pages_free,
            "slack": None if stats is None else stats.slack,
        }


def _process_of(status: NodeStatus | None) -> _Process | None:
    return None if status is None else (status.machine, status.pid)


class NodesOwner(Protocol):
    """Callbacks on nodes; they must not block."""

    def node_ready(self, node: ClusterNode, ready: Ready) -> None:
        """Handle a fresh engine of a node, which takes commands."""

    def node_gone(self, node: ClusterNode) -> None:
        """Handle the death of a node's engine, or of the node."""

    def node_reported(self, node: ClusterNode, report: StepReport) -> None:
        """Handle a report of steps."""


class NodeRegistry:
    """All nodes that a front has found. Belongs to one event loop."""

    def __init__(self, find_nodes: FindNodes, owner: NodesOwner, checks: NodeChecks) -> None:
        self._find_nodes = find_nodes
        self._owner = owner
        self._checks = checks
        self._nodes: dict[str, ClusterNode] = {}

    def all(self) -> list[ClusterNode]:
        """Return the nodes that were found."""
        return list(self._nodes.values())

    def used(self) -> list[ClusterNode]:
        """Return the nodes whose engines take requests and jobs."""
        return [node for node in self._nodes.values() if node.tracker is not None]

    def find(self, name: str) -> ClusterNode:
        """Return the node of a name, which exists."""
        return self._nodes[name]

    async def look(self) -> None:
        """Find nodes that have joined, and leave those that are gone. Ask for the status of nodes
        that are not used, and of those whose status is older than their engine.
        """
        try:
            calls_by_name = await self._find_nodes()
        except (CoserveError, TimeoutError) as error:
            _log.warning("the nodes cannot be listed: %s", error)
            return
        for name, calls in calls_by_name.items():
            if name not in self._nodes:
                self._add(name, calls)
        for name in [name for name in self._nodes if name not in calls_by_name]:
            await self._leave(self._nodes.pop(name))
        for node in self._nodes.values():
            if node.tracker is None or node.status_of != node.num_engines:
                self._begin_to_ask(node)

    def engine_used(self, node: ClusterNode) -> None:
        """Note that a node's engine is used, another one than before, and ask for the status of its
        process, which may be another one, too.
        """
        node.problem, node.is_refused = None, False
        node.num_engines += 1
        self._begin_to_ask(node)

    def _begin_to_ask(self, node: ClusterNode) -> None:
        if node.asking is None or node.asking.done():
            node.asking = asyncio.create_task(self._ask(node))

    def refuse(self, node: ClusterNode, problem: str) -> None:
        """Note why a node is not to be used as it is."""
        if node.problem != problem:
            _log.error("the node %s is not used: %s", node.name, problem)
        node.problem, node.is_refused = problem, True

    async def close(self) -> None:
        """Leave all nodes: their engines forget their requests and jobs."""
        await asyncio.gather(*map(self._leave, self._nodes.values()))

    def _add(self, name: str, calls: NodeCalls) -> None:
        connections: list[NodeConnection] = []

        def connect(owner: EngineOwner) -> NodeConnection:
            connections.append(NodeConnection(name, calls, owner))
            return connections[0]

        # `node` is bound below, before the link runs.
        def lose(request: str, stream: RequestStream, error: EngineGoneError) -> None:
            node.lost.append(request)

        link = EngineLink(connect, on_lost=lose)
        node = self._nodes[name] = ClusterNode(
            name=name, calls=calls, link=link, connection=connections[0]
        )
        link.listen(_NodeListener(self._owner, node))

    async def _ask(self, node: ClusterNode) -> None:
        """Ask for a node's status; attach to the node if it can be used, else note why not."""
        engine = node.num_engines
        try:
            status = await asyncio.wait_for(node.calls.describe(), _DESCRIBE_S)
        except (CoserveError, TimeoutError) as error:
            if node.tracker is None:
                node.problem, node.is_refused = str(error) or "it does not answer", False
            return
        node.update_status(status, engine)
        if status.version != VERSION:
            self.refuse(
                node,
                f"it runs coserve {status.version}, and this is {VERSION}: install the same "
                f"everywhere",
            )
        elif self._checks.has_other_settings(status):
            await self._renew(node)
        elif status.error is not None:
            self.refuse(node, status.error)
        elif node.running is None:
            await self._attach(node)

    async def _renew(self, node: ClusterNode) -> None:
        """Replace a node that another front has made for something else."""
        try:
            await self._checks.renew(node.name)
        except (CoserveError, TimeoutError) as error:
            self.refuse(node, str(error) or "it cannot be replaced")
            return
        _log.warning(
            "the node %s had the settings of another front, and is being replaced", node.name
        )
        node.problem, node.is_refused = (
            "it had the settings of another front, and is being replaced",
            False,
        )

    async def _attach(self, node: ClusterNode) -> None:
        """Attach to a node if it sees what this front sees."""
        try:
            problem = await self._checks.unseen(node.calls, home_alone=True)
        except (CoserveError, TimeoutError) as error:
            node.problem, node.is_refused = (
                str(error) or "it does not answer whether it sees the front's files",
                False,
            )
            return
        if problem is not None:
            self.refuse(node, problem)
            return
        node.problem, node.is_refused = None, False
        node.running = asyncio.create_task(node.link.run())

    async def _leave(self, node: ClusterNode) -> None:
        node.connection.close()
        await node.connection.end(0.0)
        tasks = [task for task in (node.running, node.asking) if task is not None]
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


class _NodeListener:
    """An `EngineListener` that passes on reports with their node."""

    def __init__(self, owner: NodesOwner, node: ClusterNode) -> None:
        self.engine_ready = partial(owner.node_ready, node)
        self.engine_gone = partial(owner.node_gone, node)
        self.engine_reported = partial(owner.node_reported, node)
