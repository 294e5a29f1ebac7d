"""Nodes on Ray: an actor each, which Ray starts again wherever there is a free device (its resource
`DEVICE`).
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import list_named_actors

from coserve.cluster.nodes.messages import (
    CommandBatch,
    NodeCalls,
    NodeReports,
    NodeSettings,
    NodeStatus,
)
from coserve.cluster.nodes.registry import NODE, node_names
from coserve.cluster.nodes.shared_paths import SharedPaths
from coserve.cluster.ray.actor import NodeActor
from coserve.cluster.ray.errors import first_line
from coserve.cluster.ray.machine import DEVICE
from coserve.cluster.ray.resources import NodeResources, node_resources
from coserve.errors import ClusterError, CoserveError, EngineGoneError

_log = logging.getLogger(__name__)

NAMESPACE = "coserve"
# How often Ray is asked for devices that have joined.
_COUNT_S = 2.0
_CALL_S = 10.0
# An actor that Ray does not start again, since its own start failed or somebody ended it, is made
# again after this.
_MAKE_AGAIN_S = 10.0
# Until Ray has forgotten an actor that it was told to end.
_END_S, _POLL_S = 10.0, 0.1


class RayNode:
    """An actor, as the front sees it. Implements `NodeCalls`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def describe(self) -> NodeStatus:
        found: NodeStatus = await self._ask("describe")
        return found

    async def look_at(self, shared: SharedPaths) -> str | None:
        found: str | None = await self._ask("look_at", shared)
        return found

    async def attach(self, session: str) -> None:
        await self._ask("attach", session)

    async def send(self, session: str, batch: CommandBatch) -> None:
        await self._ask("send", session, batch)

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        found: NodeReports = await self._ask("reports", session, after, wait_s)
        return found

    async def detach(self, session: str) -> None:
        await self._ask("detach", session)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except CoserveError as error:  # the actor's own
            raise EngineGoneError(first_line(error)) from None
        except ActorUnavailableError:
            raise EngineGoneError(
                "its actor is being started again, or waits for a free device"
            ) from None
        except RayError as error:
            raise EngineGoneError(first_line(error)) from None


class RayNodes:
    """An actor for each device of the cluster, made as devices join. One whose machine is gone
    waits for another.
    """

    def __init__(self, settings: NodeSettings, *, uses_gpu: bool) -> None:
        """uses_gpu: each rank of a node needs one of Ray's GPUs, if there are any."""
        self._settings, self._uses_gpu = msgspec.msgpack.encode(settings), uses_gpu
        self._engine = settings.engine
        self._found: dict[str, RayNode] = {}
        self._made_s: dict[str, float] = {}
        self._counted_s, self._has_warned = float("-inf"), False

    async def find(self) -> dict[str, NodeCalls]:
        """By name; a `FindNodes`. ClusterError if Ray does not tell."""
        if time.monotonic() - self._counted_s > _COUNT_S:
            self._counted_s = time.monotonic()
            try:
                await asyncio.to_thread(self._make_missing)
            except RayError as error:
                raise ClusterError(
                    f"Ray does not say which devices there are: {first_line(error)}"
                ) from None
        return dict(self._found)

    async def renew(self, name: str) -> None:
        """Have another actor in the place of one that was found, with the settings that these nodes
        have. ClusterError if Ray does not.
        """
        node = self._found[name]
        try:
            node.actor = await asyncio.to_thread(self._make_anew, name, node.actor)
        except RayError as error:
            raise ClusterError(f"Ray does not make it anew: {first_line(error)}") from None

    def _make_anew(self, name: str, old: Any) -> Any:
        ray.kill(old)
        until_s = time.monotonic() + _END_S
        while name in _names():  # else it would be the old one that is found
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"the actor with other settings has not ended within {_END_S:g} s"
                )
            time.sleep(_POLL_S)
        return self._make(name)

    def _make_missing(self) -> None:
        found = ray.cluster_resources()
        num_devices = int(found.get(DEVICE, 0))
        existing = _names()
        for name in node_names(existing, num_devices):
            if (node := self._found.get(name)) is None:
                self._found[name] = RayNode(self._make(name))
            elif name not in existing and time.monotonic() - self._made_s[name] > _MAKE_AGAIN_S:
                node.actor = self._make(
                    name
                )  # its home could not be written, say, or somebody has ended it
        num_gpus, num_cpus = int(found.get("GPU", 0)), int(found.get("CPU", 0))
        shortage = self._resources(num_gpus).shortage(
            num_devices, num_gpus=num_gpus, num_cpus=num_cpus
        )
        if shortage and not self._has_warned:
            self._has_warned = True
            _log.warning("%s", shortage)

    def _resources(self, num_gpus: int) -> NodeResources:
        """Return what a node needs in a cluster that has this many GPUs."""
        return node_resources(self._engine, uses_gpus=self._uses_gpu and num_gpus > 0)

    def _make(self, name: str) -> Any:
        """Make an actor; the one of this name, if there is one."""
        resources = self._resources(int(ray.cluster_resources().get("GPU", 0)))
        made = ray.remote(NodeActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            resources={DEVICE: 1},
        )
        self._made_s[name] = time.monotonic()
        return made.remote(self._settings)


def ask_nodes() -> list[NodeStatus]:
    """What nodes that answer say of themselves."""
    asked = [actor.describe.remote() for actor in node_actors()]
    answered, _ = ray.wait(asked, timeout=_CALL_S, num_returns=len(asked)) if asked else ([], [])
    found: list[NodeStatus] = []
    for each in answered:
        with suppress(RayError):
            found.append(ray.get(each))
    return found


def node_actors() -> list[Any]:
    """Of all nodes that there are."""
    found = []
    for name in _names():
        with suppress(ValueError):  # it has just ended
            found.append(ray.get_actor(name, NAMESPACE))
    return found


def _names() -> list[str]:
    """Of nodes' actors, those that wait for a device among them."""
    actors = list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(NODE))
