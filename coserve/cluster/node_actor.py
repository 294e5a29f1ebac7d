"""What a node's actor runs. A module of its own: its process starts without Ray Serve, the server and torch."""

import msgspec

from coserve.cluster.messages import CommandBatch, NodeReports, NodeSettings, NodeStatus
from coserve.cluster.node import Node
from coserve.cluster.shared_paths import SharedPaths


class NodeActor:
    """A `Node` as Ray's actor."""

    def __init__(self, settings: bytes) -> None:
        self._node = Node(msgspec.msgpack.decode(settings, type=NodeSettings))

    async def describe(self) -> NodeStatus:
        return await self._node.describe()

    async def look_at(self, shared: SharedPaths) -> str | None:
        return await self._node.look_at(shared)

    async def attach(self, session: str) -> None:
        await self._node.attach(session)

    async def send(self, session: str, batch: CommandBatch) -> None:
        await self._node.send(session, batch)

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        return await self._node.reports(session, after, wait_s)

    async def detach(self, session: str) -> None:
        await self._node.detach(session)

    async def stop(self) -> None:
        await self._node.stop()
