"""What touches Ray, beside `ray_machine` and `ray_nodes`: the front is Ray Serve's application, and commands ask it.

Ray keeps all alive: it starts a node's actor again wherever there is a free device, and a front where its files are.
Ray Serve's interfaces are used as of the version that pyproject.toml pins.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from coserve.cluster.front import DEFAULT_PLACEMENT, Front, check_config, node_settings
from coserve.cluster.node_checks import NodeChecks
from coserve.cluster.ray_machine import DEVICE, Served, tell_served
from coserve.cluster.ray_nodes import NAMESPACE, RayNodes, ask_nodes, first_line, node_actors
from coserve.cluster.standby import ANSWERS, StandbyFront, choose_front
from coserve.errors import ClusterError
from coserve.logs import configure_logs
from coserve.server.config import ServerConfig
from coserve.server.home_lock import lock_home

_log = logging.getLogger(__name__)

APPLICATION, FRONT = "coserve", "front"
# How often Ray Serve looks whether the front lives.
_HEALTH_S = 1.0
_START_S, _CALL_S = 300.0, 10.0


class FrontRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Has Ray Serve give every request, and every call, to the front that answers."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # where nobody answers, Ray asks again after a while, and not at once forever
            pending_request.routing_context.should_backoff = True
        return [choose_front({replica: replica.routing_stats for replica in candidate_replicas})]


class FrontApplication:
    """A `StandbyFront` as a deployment of Ray Serve."""

    async def __init__(self, config: ServerConfig, placement: str, num_fronts: int) -> None:  # type: ignore[misc]  # Serve awaits it
        configure_logs(config.log_format, config.log_level)
        settings = await asyncio.to_thread(node_settings, config)
        nodes = RayNodes(settings, uses_gpu=config.device != "cpu")
        front = Front(config, nodes.find, placement, checks=NodeChecks(settings, nodes.renew))
        self._standby = StandbyFront(front)
        self._front = self._standby.front
        await self._standby.begin(others=num_fronts > 1)
        await asyncio.to_thread(tell_served, Served(model=config.model))

    def __serve_build_asgi_app__(self) -> StandbyFront:
        return self._standby

    def record_routing_stats(self) -> dict[str, bool]:
        return self._standby.stats

    def check_health(self) -> None:
        self._standby.check()

    async def describe(self) -> dict[str, Any]:
        """For those who ask without HTTP."""
        return {"pid": os.getpid(), "nodes": self._front.link.describe(), "waiting": self._front.link.waiting}

    async def drain(self, name: str) -> str | None:
        """See `ClusterLink.drain`; what is wrong, if anything."""
        try:
            await self._front.link.drain(name)
        except ClusterError as error:
            return str(error)
        return None

    async def reload_keys(self) -> None:
        """See `Front.reload_keys`."""
        self._front.reload_keys()

    async def __del__(self) -> None:
        if self._standby.stats[ANSWERS]:  # Ray Serve may be ended by its own commands, in a cluster that lives on
            await asyncio.to_thread(_tell_nothing_served)
        await self._standby.stop()


# -- what commands do ---------------------------------------------------------------------


def connect(address: str) -> None:
    """Have this process ask the cluster. ClusterError if it cannot be reached."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"the Ray cluster at {address} cannot be used: {first_line(error)}") from None
    finally:
        # Ray's own, which it sets here, prints where the process was, and ends it without anything of ours.
        if own is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, own)


def disconnect() -> None:
    """The inverse."""
    ray.shutdown()


def served_models() -> list[str]:
    """What the nodes of the cluster serve; empty if there is no front yet."""
    if APPLICATION not in _applications():
        return []
    found = [each.model for each in ask_nodes() if each.model is not None]
    return found or [""]


def _applications() -> list[str]:
    with suppress(Exception):  # Ray Serve raises whatever it meets where it does not run
        return list(serve.status().applications)
    return []


def this_machine() -> dict[str, float]:
    """Ray's resource that binds a front to this machine, where its home is."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def deploy(config: ServerConfig, placement: str, *, resources: dict[str, float], num_fronts: int = 1) -> None:
    """Have Ray Serve run the front. resources: of Ray's, that each of the fronts needs. ClusterError if it cannot
    start.
    """
    if num_fronts > 1:  # those would wait for it without a word
        with lock_home(config.directory):
            pass
    serve.start(
        proxy_location="HeadOnly",
        http_options={
            "host": config.host,
            "port": config.port,
            "keep_alive_timeout_s": int(config.timeout_keep_alive_s),
            # One file may have both, which Serve does not know.
            "ssl_certfile": config.ssl_certfile,
            "ssl_keyfile": config.ssl_keyfile or config.ssl_certfile,
        },
    )
    try:
        serve.run(application(config, placement, resources, num_fronts), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        reason = front_error() or first_line(error)
        _tell_nothing_served()
        with suppress(Exception):
            serve.delete(APPLICATION)
        raise ClusterError(f"the front cannot start: {reason}") from None


def application(config: ServerConfig, placement: str, resources: dict[str, float], num_fronts: int) -> Any:
    """The front, for Ray Serve. resources: of Ray's, that each of the fronts needs."""
    front = serve.deployment(
        serve.ingress()(FrontApplication),
        name=FRONT,
        num_replicas=num_fronts,
        max_ongoing_requests=config.max_connections,
        ray_actor_options={"num_cpus": 0, "resources": resources},
        health_check_period_s=_HEALTH_S,
        request_router_config=RequestRouterConfig(
            request_router_class=FrontRouter, request_routing_stats_period_s=_HEALTH_S
        ),
        graceful_shutdown_timeout_s=config.drain_s,
        max_constructor_retry_count=2,
    )
    return front.bind(config, placement, num_fronts)


def serve_application(arguments: dict[str, Any]) -> Any:
    """The front, for configuration files of Ray Serve's. arguments: fields of `ServerConfig`, "placement" and
    "fronts".
    """
    given = dict(arguments)
    placement, num_fronts = given.pop("placement", DEFAULT_PLACEMENT), given.pop("fronts", 1)
    try:
        config = ServerConfig(**given)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"the arguments of the application {APPLICATION} cannot be used: {error}") from None
    check_config(config)
    return application(config, placement, {}, num_fronts)


def front_error() -> str | None:
    """Why the front does not start, in one line."""
    with suppress(Exception):
        found = serve.status().applications[APPLICATION]
        text = "\n".join([found.message, *(each.message for each in found.deployments.values())])
        lines = [line.strip() for line in text.splitlines() if "Error: " in line]
        return lines[-1].partition("Error: ")[2] if lines else None
    return None


def undeploy() -> None:
    """End the front, and the nodes."""
    _tell_nothing_served()
    with suppress(Exception):
        serve.shutdown()
    for actor in node_actors():
        with suppress(RayError):
            ray.kill(actor)


def _tell_nothing_served() -> None:
    with suppress(RayError):  # Ray itself may be gone
        tell_served(None)


def status() -> dict[str, Any]:
    """What the front says of its nodes. ClusterError if there is none that answers."""
    if APPLICATION not in _applications():
        raise ClusterError("the cluster has no front: start one with coserve cluster up")
    try:
        handle = serve.get_app_handle(APPLICATION)
        found: dict[str, Any] = handle.describe.remote().result(timeout_s=_CALL_S)
    except (RayError, TimeoutError, RuntimeError) as error:
        raise ClusterError(f"the front does not answer: {first_line(error)}") from None
    return found


def drain(name: str, limit_s: float) -> None:
    """Have a node get nothing more, and its jobs continue on others. ClusterError if that cannot be."""
    try:
        wrong = serve.get_app_handle(APPLICATION).drain.remote(name).result(timeout_s=limit_s)
    except (RayError, TimeoutError, RuntimeError) as error:
        raise ClusterError(f"the node {name} has not drained: {first_line(error)}") from None
    if wrong is not None:
        raise ClusterError(wrong)


def reload_keys() -> None:
    """Have the front read its keys' file again. ClusterError if it does not answer."""
    try:
        serve.get_app_handle(APPLICATION).reload_keys.remote().result(timeout_s=_CALL_S)
    except (RayError, TimeoutError, RuntimeError) as error:
        raise ClusterError(f"the keys have not been read again: {first_line(error)}") from None


def drain_here(limit_s: float) -> None:
    """Likewise, all nodes of this machine, which is about to leave."""
    for node in status()["nodes"]:
        if node["host"] == socket.gethostname() and node["state"] == "ready":
            drain(node["name"], limit_s)


def wait_for_nodes(is_ended: Callable[[], bool]) -> int | None:
    """Until every device is a node that is ready, or it is ended (None); how many they are. ClusterError says what is
    wrong with one that will not be.
    """
    until_s = time.monotonic() + _START_S
    while not is_ended():
        number, nodes = int(ray.cluster_resources().get(DEVICE, 0)), status()["nodes"]
        ready = [each for each in nodes if each["state"] == "ready"]
        if len(ready) >= number:
            return len(ready)
        if wrong := [f"the node {each['name']} cannot be used: {each['refused']}" for each in nodes if each["refused"]]:
            raise ClusterError(wrong[0])
        if time.monotonic() > until_s:
            problems = [f"{each['name']}: {each['problem']}" for each in nodes if each["problem"]]
            raise ClusterError("; ".join([f"{len(ready)} of {number} nodes are ready in {_START_S:g} s", *problems]))
        time.sleep(0.5)
    return None
