"""Actor of a node. A module of its own: the actor's process starts without Ray Serve, the server
and torch.
"""

import msgspec
import ray

from coserve.cluster.nodes.messages import CommandBatch, NodeReports, NodeSettings, NodeStatus
from coserve.cluster.nodes.node import NodeServer
from coserve.cluster.nodes.shared_paths import SharedPaths


class NodeActor:
    """A `NodeServer` as Ray's actor."""

    def __init__(self, settings: bytes) -> None:
        self._node = NodeServer(msgspec.msgpack.decode(settings, type=NodeSettings))
        self._machine: str = ray.get_runtime_context().get_node_id()

    async def describe(self) -> NodeStatus:
        return msgspec.structs.replace(await self._node.describe(), machine=self._machine)

    async def compare_files(self, shared: SharedPaths) -> str | None:
        return await self._node.compare_files(shared)

    async def attach(self, session: str) -> None:
        await self._node.attach(session)

    async def send(self, session: str, batch: CommandBatch) -> None:
        await self._node.send(session, batch)

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        return await self._node.reports(session, after, wait_s)

    async def detach(self, session: str) -> None:
        await self._node.detach(session)
