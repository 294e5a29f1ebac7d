"""Nodes on Ray: an actor each, which Ray starts again wherever there is a free device (`DEVICE`, Ray's resource)."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import list_named_actors

from coserve.cluster.messages import CommandBatch, NodeCalls, NodeReports, NodeSettings, NodeStatus
from coserve.cluster.node_actor import NodeActor
from coserve.cluster.nodes import NODE, node_names
from coserve.cluster.ray_machine import DEVICE
from coserve.errors import ClusterError, CoserveError, EngineGoneError

NAMESPACE = "coserve"
# How often Ray is asked for devices that have joined.
_COUNT_S = 2.0
_CALL_S = 10.0


class RayNode:
    """An actor, as the front sees it. Implements `NodeCalls`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def describe(self) -> NodeStatus:
        found: NodeStatus = await self._ask("describe")
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
            raise EngineGoneError("its actor is being started again, or waits for a free device") from None
        except RayError as error:
            raise EngineGoneError(first_line(error)) from None


class RayNodes:
    """An actor for each device of the cluster, made as devices join. One whose machine is gone waits for another."""

    def __init__(self, settings: NodeSettings, *, uses_gpu: bool) -> None:
        """uses_gpu: each needs one of Ray's GPUs, if there are any."""
        self._settings, self._uses_gpu = msgspec.msgpack.encode(settings), uses_gpu
        self._found: dict[str, NodeCalls] = {}
        self._counted_s = float("-inf")

    async def find(self) -> dict[str, NodeCalls]:
        """By name; a `FindNodes`. ClusterError if Ray does not tell."""
        if time.monotonic() - self._counted_s > _COUNT_S:
            self._counted_s = time.monotonic()
            try:
                await asyncio.to_thread(self._make_missing)
            except RayError as error:
                raise ClusterError(f"Ray does not say which devices there are: {first_line(error)}") from None
        return dict(self._found)

    def _make_missing(self) -> None:
        resources = ray.cluster_resources()
        num_gpus = 1 if self._uses_gpu and resources.get("GPU") else 0
        for name in node_names(_names(), int(resources.get(DEVICE, 0))):
            if name not in self._found:
                made = ray.remote(NodeActor).options(
                    name=name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,
                    num_cpus=0,
                    num_gpus=num_gpus,
                    resources={DEVICE: 1},
                )
                self._found[name] = RayNode(made.remote(self._settings))


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


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
