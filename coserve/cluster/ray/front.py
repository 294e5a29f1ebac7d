"""The front as an application of Ray Serve: what its replicas run, and how they are deployed.

Ray keeps all alive: it starts a node's actor again wherever there is a free device, and a front
where its files are. Ray Serve's interfaces are used as of the version that pyproject.toml pins.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client

from coserve.cluster.front.choice import ANSWERS
from coserve.cluster.front.front import DEFAULT_PLACEMENT, Front, check_config, node_settings
from coserve.cluster.front.standby import StandbyFront
from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.ray.commands import APPLICATION, FRONT, SILENT, STOP_S, announce_nothing_served
from coserve.cluster.ray.errors import first_line, last_error
from coserve.cluster.ray.machine import Served, announce_served
from coserve.cluster.ray.nodes import RayNodes
from coserve.cluster.ray.router import FrontRouter
from coserve.errors import ClusterError, FrontSilentError
from coserve.logs import configure_logs
from coserve.server.config import ServerConfig
from coserve.server.lifecycle.home_lock import lock_home

# Interval of Ray Serve's health checks.
_HEALTH_S = 1.0
# Nobody may be there to try again, and what a front needs may come later. Ray Serve's default is
# three starts for each front.
_MAX_STARTS = 20


class FrontApplication:
    """A `StandbyFront` as a deployment of Ray Serve."""

    # Ray Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, config: ServerConfig, placement: str, num_fronts: int
    ) -> None:
        configure_logs(config.log_format, config.log_level)
        settings = await asyncio.to_thread(node_settings, config)
        nodes = RayNodes(settings, uses_gpu=config.device != "cpu")
        front = Front(config, nodes.find, placement, checks=NodeChecks(settings, nodes.renew))
        self._standby = StandbyFront(front)
        self._front = self._standby.front
        await self._standby.begin(others=num_fronts > 1)
        await asyncio.to_thread(
            announce_served, Served(model=config.model, num_ranks=config.tensor_parallel)
        )

    def __serve_build_asgi_app__(self) -> StandbyFront:
        return self._standby

    def record_routing_stats(self) -> dict[str, bool]:
        return self._standby.stats

    def check_health(self) -> None:
        self._standby.check()

    async def describe(self) -> dict[str, Any]:
        """Return the state of the cluster, for callers without HTTP. "drain_s": seconds that
        requests are waited for at the end.
        """
        link = self._front.link
        drain_s = self._front.config.drain_s
        return {
            "pid": os.getpid(),
            "nodes": link.describe(),
            "waiting": link.waiting,
            "drain_s": drain_s,
        }

    async def drain(self, names: Sequence[str]) -> str | None:
        """Drain nodes as `ClusterLink.drain` does; return what is wrong in one line, None if
        nothing is.
        """
        try:
            await self._front.link.drain(*names)
        except ClusterError as error:
            return str(error)
        return None

    async def end(self, wait_s: float) -> None:
        """End the front: `StandbyFront.end`."""
        await self._standby.end(wait_s)

    async def reload_keys(self) -> None:
        """Read the keys' file again."""
        self._front.reload_keys()

    async def __del__(self) -> None:
        # Ray Serve may be ended by its own commands, in a cluster that lives on.
        if self._standby.stats[ANSWERS]:
            await asyncio.to_thread(announce_nothing_served)
        await self._standby.stop()


def check_http(config: ServerConfig) -> None:
    """Check that Ray Serve, if it runs already, listens as this server is to listen. It keeps its
    options and only logs others; what should be encrypted would not be.

    Raises:
        ClusterError: An option of its HTTP servers differs.
    """
    try:
        running = _get_global_client(raise_if_no_controller_running=False)
    except SILENT as error:
        raise FrontSilentError(
            f"Ray Serve does not report where it listens: {first_line(error)}"
        ) from None
    if running is None:
        return
    for name, value in _http_options(config).items():
        if (now := getattr(running.http_config, name)) != value:
            raise ClusterError(
                f"Ray Serve runs in this cluster already, and its {name} is {now!r}, not "
                f"{value!r}: ask for the same, "
                "or end it first with serve shutdown"
            )


def _http_options(config: ServerConfig) -> dict[str, Any]:
    return {
        "host": config.host,
        "port": config.port,
        "keep_alive_timeout_s": int(config.timeout_keep_alive_s),
        # One file may have both; Ray Serve needs two options.
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile or config.ssl_certfile,
    }


def deploy(
    config: ServerConfig, placement: str, *, resources: dict[str, float], num_fronts: int = 1
) -> None:
    """Have Ray Serve run the front.

    Args:
        config: Options of the server.
        placement: Name of the placement.
        resources: Ray's resources that each front needs.
        num_fronts: Number of fronts.

    Raises:
        ClusterError: The front cannot start.
    """
    if num_fronts > 1:  # else fronts would wait silently for another server's home
        with lock_home(config.directory):
            pass
    try:
        serve.start(proxy_location="HeadOnly", http_options=_http_options(config))
    except SILENT as error:
        raise ClusterError(
            f"Ray Serve cannot listen at {config.host}:{config.port}: {last_error(str(error))}; "
            f"choose another --port "
            "or --host"
        ) from None
    try:
        # One start: the caller sees what is wrong, and can try again.
        front = application(config, placement, resources, num_fronts, max_starts=1)
        serve.run(front, name=APPLICATION, route_prefix="/")
    except SILENT as error:
        reason = front_error() or first_line(error)
        announce_nothing_served()
        with suppress(Exception):
            serve.delete(APPLICATION)
        raise ClusterError(f"the front cannot start: {reason}") from None


def application(
    config: ServerConfig,
    placement: str,
    resources: dict[str, float],
    num_fronts: int,
    max_starts: int = _MAX_STARTS,
) -> Any:
    """Return the front for Ray Serve.

    Args:
        config: Options of the server.
        placement: Name of the placement.
        resources: Ray's resources that each front needs.
        num_fronts: Number of fronts.
        max_starts: Starts that may fail before one has succeeded; then the front is given up.
    """
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
        graceful_shutdown_timeout_s=config.drain_s + STOP_S,
        max_constructor_retry_count=max_starts,
    )
    return front.bind(config, placement, num_fronts)


def serve_application(arguments: dict[str, Any]) -> Any:
    """Return the front for a configuration file of Ray Serve.

    Args:
        arguments: Fields of `ServerConfig`, "placement" and "fronts".

    Raises:
        ClusterError: An argument cannot be used.
    """
    options = dict(arguments)
    placement, num_fronts = options.pop("placement", DEFAULT_PLACEMENT), options.pop("fronts", 1)
    try:
        config = ServerConfig(**options)
    except (TypeError, ValueError) as error:
        raise ClusterError(
            f"the arguments of the application {APPLICATION} cannot be used: {error}"
        ) from None
    check_config(config)
    return application(config, placement, {}, num_fronts)


def front_error() -> str | None:
    """Return in one line why the front does not start; None if Ray Serve gives no reason."""
    with suppress(Exception):
        status = serve.status().applications[APPLICATION]
        text = "\n".join([status.message, *(each.message for each in status.deployments.values())])
        lines = [line.strip() for line in text.splitlines() if "Error: " in line]
        return lines[-1].partition("Error: ")[2] if lines else None
    return None
