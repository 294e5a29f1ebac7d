"""The front is an application of Ray Serve's, and commands ask it. Ray is touched here, in `ray_machine`, `ray_nodes`
and `node_actor` alone.

Ray keeps all alive: it starts a node's actor again wherever there is a free device, and a front where its files are.
Ray Serve's interfaces are used as of the version that pyproject.toml pins.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from coserve.cluster import machines
from coserve.cluster.deploy_claim import DeployClaim
from coserve.cluster.front import DEFAULT_PLACEMENT, Front, check_config, node_settings
from coserve.cluster.node_checks import NodeChecks
from coserve.cluster.ray_errors import first_line, last_words
from coserve.cluster.ray_machine import DEVICE, ClusterKeys, Served, served_at, tell_served
from coserve.cluster.ray_nodes import NAMESPACE, RayNodes, ask_nodes, node_actors
from coserve.cluster.standby import ANSWERS, StandbyFront, choose_front
from coserve.errors import ClusterError, FrontSilentError
from coserve.logs import configure_logs
from coserve.server.config import ServerConfig
from coserve.server.home_lock import lock_home

_log = logging.getLogger(__name__)

APPLICATION, FRONT = "coserve", "front"
# How often Ray Serve looks whether the front lives.
_HEALTH_S = 1.0
_CALL_S = 10.0
# What a front's end takes after its requests: checkpoints, and what it still has to write.
_STOP_S = 30.0
# What Ray, Ray Serve and their connections raise when they do not answer.
_SILENT = (RayError, RayServeException, TimeoutError, RuntimeError)


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
        """For those who ask without HTTP. drain_s: how long requests are waited for at the end."""
        link = self._front.link
        drain_s = self._front.config.drain_s
        return {"pid": os.getpid(), "nodes": link.describe(), "waiting": link.waiting, "drain_s": drain_s}

    async def drain(self, names: Sequence[str]) -> str | None:
        """See `ClusterLink.drain`; what is wrong, if anything."""
        try:
            await self._front.link.drain(*names)
        except ClusterError as error:
            return str(error)
        return None

    async def end(self, wait_s: float) -> None:
        """See `StandbyFront.end`."""
        await self._standby.end(wait_s)

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
    """What the nodes of the cluster serve; empty if it has no front. ClusterError if Ray does not tell."""
    if APPLICATION not in _applications():
        return []
    found = [each.model for each in ask_nodes() if each.model is not None]
    if not found and (told := served_at(ray.get_runtime_context().gcs_address)) is not None:
        found = [told.model]  # whose nodes are about to come
    return found or [""]


def _applications() -> list[str]:
    """Ray Serve's; none where it does not run."""
    try:
        return list(serve.status().applications)
    except _SILENT as error:
        raise FrontSilentError(f"Ray Serve does not say what it runs: {first_line(error)}") from None


def this_machine() -> dict[str, float]:
    """Ray's resource that binds a front to this machine, where its home is."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def check_http(config: ServerConfig) -> None:
    """ClusterError if Ray Serve runs already, for others, and listens otherwise than is asked here: it keeps to what it
    began with, and only logs that; what is to be encrypted would not be.
    """
    try:
        running = _get_global_client(raise_if_no_controller_running=False)
    except _SILENT as error:
        raise FrontSilentError(f"Ray Serve does not say where it listens: {first_line(error)}") from None
    if running is None:
        return
    for name, value in _http_options(config).items():
        if (now := getattr(running.http_config, name)) != value:
            raise ClusterError(
                f"Ray Serve runs in this cluster already, and its {name} is {now!r}, not {value!r}: ask for the same, "
                "or end it first with serve shutdown"
            )


def _http_options(config: ServerConfig) -> dict[str, Any]:
    return {
        "host": config.host,
        "port": config.port,
        "keep_alive_timeout_s": int(config.timeout_keep_alive_s),
        # One file may have both, which Serve does not know.
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile or config.ssl_certfile,
    }


def deploy(config: ServerConfig, placement: str, *, resources: dict[str, float], num_fronts: int = 1) -> None:
    """Have Ray Serve run the front. resources: of Ray's, that each of the fronts needs. ClusterError if it cannot
    start.
    """
    if num_fronts > 1:  # those would wait for it without a word
        with lock_home(config.directory):
            pass
    try:
        serve.start(proxy_location="HeadOnly", http_options=_http_options(config))
    except _SILENT as error:
        raise ClusterError(
            f"Ray Serve cannot listen at {config.host}:{config.port}: {last_words(str(error))}; choose another --port "
            "or --host"
        ) from None
    try:
        serve.run(application(config, placement, resources, num_fronts), name=APPLICATION, route_prefix="/")
    except _SILENT as error:
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
        graceful_shutdown_timeout_s=config.drain_s + _STOP_S,
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


def undeploy(drain_s: float = 0.0) -> None:
    """End the front, when its requests are over, or after this time, with checkpoints of its jobs; and the nodes. What
    else runs in the cluster stays, and Ray Serve for it. Nobody else begins to serve until all of it has ended.
    """
    with ExitStack() as claim:
        with suppress(ClusterError, *_SILENT):  # Ray itself may be gone
            claim.enter_context(DeployClaim(ClusterKeys(ray.get_runtime_context().gcs_address), at_once=True))
        _tell_nothing_served()
        _end_fronts(drain_s)
        with suppress(*_SILENT):
            serve.delete(APPLICATION)
        with suppress(ClusterError, *_SILENT):
            if not _applications():
                serve.shutdown()
        for actor in node_actors():
            with suppress(RayError):
                ray.kill(actor)


def _end_fronts(drain_s: float) -> None:
    """Ray Serve itself tells a front of its end when all requests are over, or by killing it."""
    for wait_s in (drain_s, 0.0):
        try:
            handle = serve.get_app_handle(APPLICATION)
            handle.describe.remote().result(timeout_s=_CALL_S)  # it knows all fronts then
            ends = handle.broadcast("end", wait_s).results(timeout_s=wait_s + _STOP_S, return_exceptions=True)
        except KeyboardInterrupt:  # the second: nobody waits for requests any more, but for checkpoints
            continue
        except _SILENT as error:
            _log.info("no front could be asked to end: %s", first_line(error))
            return
        for end in ends:
            if isinstance(end, Exception):
                _log.warning("a front has not ended in good order: %s", first_line(end))
        return


def _tell_nothing_served() -> None:
    with suppress(RayError):  # Ray itself may be gone
        tell_served(None)


class _Front:
    """The front that answers. Implements `FrontCalls`."""

    def status(self) -> dict[str, Any]:
        """See `FrontCalls`."""
        if APPLICATION not in _applications():
            raise ClusterError("the cluster has no front: start one with coserve cluster up")
        found: dict[str, Any] = _ask_front("describe")
        return found

    def drain(self, names: Sequence[str], limit_s: float) -> None:
        """See `FrontCalls`."""
        if (wrong := _ask_front("drain", list(names), limit_s=limit_s)) is not None:
            raise ClusterError(wrong)


def _ask_front(method: str, *arguments: Any, limit_s: float = _CALL_S) -> Any:
    try:
        return getattr(serve.get_app_handle(APPLICATION), method).remote(*arguments).result(timeout_s=limit_s)
    except TimeoutError:
        raise FrontSilentError(f"the front does not answer within {limit_s:.3g} s") from None
    except _SILENT as error:
        raise FrontSilentError(f"the front does not answer: {first_line(error)}") from None


def status() -> dict[str, Any]:
    """What the front says of its nodes. ClusterError if there is none that answers."""
    return _Front().status()


def drain(name: str, limit_s: float) -> None:
    """Have a node get nothing more, and its jobs continue on others. ClusterError if that cannot be."""
    try:
        _Front().drain([name], limit_s)
    except FrontSilentError as error:
        raise ClusterError(f"the node {name} has not drained: {error}") from None


def drain_machines(machine: str | None, say: Callable[[str], None]) -> None:
    """Have all nodes of a machine, by Ray's id, that is about to leave drain; None: of the machine of this process. See
    `machines.drain_machines`.
    """
    machines.drain_machines(_Front(), _machines_here() if machine is None else [machine], say=say)


def _machines_here() -> Collection[str]:
    """Ray's ids; several machines of Ray's may be on one."""
    here = ray.util.get_node_ip_address()
    return [each["NodeID"] for each in ray.nodes() if each["Alive"] and each["NodeManagerAddress"] == here]


def wait_for_nodes(
    is_ended: Callable[[], bool], machine: str | None = None, num_devices: int | None = None
) -> int | None:
    """See `machines.wait_for_nodes`. num_devices: of the machine (None: all of the cluster)."""

    def number() -> int:
        return int(ray.cluster_resources().get(DEVICE, 0)) if num_devices is None else num_devices

    return machines.wait_for_nodes(_Front(), machine, number, is_ended)


def reload_keys() -> None:
    """Have the front read its keys' file again. ClusterError if it does not answer."""
    try:
        _ask_front("reload_keys")
    except FrontSilentError as error:
        raise ClusterError(f"the keys have not been read again: {error}") from None
