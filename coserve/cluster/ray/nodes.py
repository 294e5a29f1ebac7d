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
# Interval at which Ray is asked for devices that have joined.
_COUNT_S = 2.0
_CALL_S = 10.0
# An actor that Ray does not restart, since its start failed or somebody ended it, is made again
# after this.
_MAKE_AGAIN_S = 10.0
# Time for Ray to forget an actor that it was told to end.
_END_S, _POLL_S = 10.0, 0.1


class RayNode:
    """A node's actor as the front sees it. Implements `NodeCalls`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def describe(self) -> NodeStatus:
        status: NodeStatus = await self._ask("describe")
        return status

    async def compare_files(self, shared: SharedPaths) -> str | None:
        difference: str | None = await self._ask("compare_files", shared)
        return difference

    async def attach(self, session: str) -> None:
        await self._ask("attach", session)

    async def send(self, session: str, batch: CommandBatch) -> None:
        await self._ask("send", session, batch)

    async def reports(self, session: str, after: int, wait_s: float) -> NodeReports:
        reports: NodeReports = await self._ask("reports", session, after, wait_s)
        return reports

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
    """An actor for each device of the cluster, made as devices join. An actor whose machine is gone
    waits for another device.
    """

    def __init__(self, settings: NodeSettings, *, uses_gpu: bool) -> None:
        """Begin without actors. uses_gpu: each rank of a node needs one of Ray's GPUs, if there are
        any.
        """
        self._settings = msgspec.msgpack.encode(settings)
        self._uses_gpu = uses_gpu
        self._engine = settings.engine
        self._found: dict[str, RayNode] = {}
        self._made_s: dict[str, float] = {}
        self._counted_s = float("-inf")
        self._has_warned = False

    async def find(self) -> dict[str, NodeCalls]:
        """Return all nodes by name: a `FindNodes`.

        Raises:
            ClusterError: Ray does not answer.
        """
        if time.monotonic() - self._counted_s > _COUNT_S:
            self._counted_s = time.monotonic()
            try:
                await asyncio.to_thread(self._make_missing)
            except RayError as error:
                raise ClusterError(f"Ray does not list its devices: {first_line(error)}") from None
        return dict(self._found)

    async def renew(self, name: str) -> None:
        """Replace a node's actor by one with the settings of these nodes.

        Raises:
            ClusterError: Ray has not replaced it.
        """
        node = self._found[name]
        try:
            node.actor = await asyncio.to_thread(self._make_anew, name, node.actor)
        except RayError as error:
            raise ClusterError(f"Ray does not replace it: {first_line(error)}") from None

    def _make_anew(self, name: str, old: Any) -> Any:
        ray.kill(old)
        until_s = time.monotonic() + _END_S
        while name in _names():  # else the old actor would be found by this name
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"the actor with other settings has not ended within {_END_S:g} s"
                )
            time.sleep(_POLL_S)
        return self._make(name)

    def _make_missing(self) -> None:
        resources = ray.cluster_resources()
        num_devices = int(resources.get(DEVICE, 0))
        existing = _names()
        for name in node_names(existing, num_devices):
            if (node := self._found.get(name)) is None:
                self._found[name] = RayNode(self._make(name))
            elif name not in existing and time.monotonic() - self._made_s[name] > _MAKE_AGAIN_S:
                node.actor = self._make(
                    name
                )  # its home could not be written, say, or somebody has ended it
        num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
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
        """Make an actor, or return the one of this name."""
        resources = self._resources(int(ray.cluster_resources().get("GPU", 0)))
        actor_class = ray.remote(NodeActor).options(
            name=name,
            namespace=NAMESPACE,
            # A node outlives its front, and the next front finds it by name.
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            resources={DEVICE: 1},
        )
        self._made_s[name] = time.monotonic()
        return actor_class.remote(self._settings)


def ask_nodes() -> list[NodeStatus]:
    """Return the status of each node that answers."""
    asked = [actor.describe.remote() for actor in node_actors()]
    answered, _ = ray.wait(asked, timeout=_CALL_S, num_returns=len(asked)) if asked else ([], [])
    statuses: list[NodeStatus] = []
    for each in answered:
        with suppress(RayError):
            statuses.append(ray.get(each))
    return statuses


def node_actors() -> list[Any]:
    """Return the actors of all nodes."""
    actors = []
    for name in _names():
        with suppress(ValueError):  # it has just ended
            actors.append(ray.get_actor(name, NAMESPACE))
    return actors


def _names() -> list[str]:
    """Return the names of all nodes' actors, those that wait for a device among them."""
    actors = list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(NODE))
