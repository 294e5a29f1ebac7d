"""The front as an application of Ray Serve's: what its replicas run, and how they are deployed.
`on_ray` asks it.

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
from coserve.cluster.ray.commands import APPLICATION, FRONT, SILENT, STOP_S, tell_nothing_served
from coserve.cluster.ray.errors import first_line, last_words
from coserve.cluster.ray.machine import Served, tell_served
from coserve.cluster.ray.nodes import RayNodes
from coserve.cluster.ray.router import FrontRouter
from coserve.errors import ClusterError, FrontSilentError
from coserve.logs import configure_logs
from coserve.server.config import ServerConfig
from coserve.server.lifecycle.home_lock import lock_home

# How often Ray Serve looks whether the front lives.
_HEALTH_S = 1.0
# Where nobody may be there to try again: what a front needs may come later. Ray Serve allows three
# for each front.
_MOST_STARTS = 20


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
        await asyncio.to_thread(
            tell_served, Served(model=config.model, num_ranks=config.tensor_parallel)
        )

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
        return {
            "pid": os.getpid(),
            "nodes": link.describe(),
            "waiting": link.waiting,
            "drain_s": drain_s,
        }

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
        if self._standby.stats[
            ANSWERS
        ]:  # Ray Serve may be ended by its own commands, in a cluster that lives on
            await asyncio.to_thread(tell_nothing_served)
        await self._standby.stop()


def check_http(config: ServerConfig) -> None:
    """ClusterError if Ray Serve runs already, for others, and listens otherwise than is asked here:
    it keeps to what it began with, and only logs that; what is to be encrypted would not be.
    """
    try:
        running = _get_global_client(raise_if_no_controller_running=False)
    except SILENT as error:
        raise FrontSilentError(
            f"Ray Serve does not say where it listens: {first_line(error)}"
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
        # One file may have both, which Serve does not know.
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile or config.ssl_certfile,
    }


def deploy(
    config: ServerConfig, placement: str, *, resources: dict[str, float], num_fronts: int = 1
) -> None:
    """Have Ray Serve run the front. resources: of Ray's, that each of the fronts needs.
    ClusterError if it cannot start.
    """
    if num_fronts > 1:  # those would wait for it without a word
        with lock_home(config.directory):
            pass
    try:
        serve.start(proxy_location="HeadOnly", http_options=_http_options(config))
    except SILENT as error:
        raise ClusterError(
            f"Ray Serve cannot listen at {config.host}:{config.port}: {last_words(str(error))}; "
            f"choose another --port "
            "or --host"
        ) from None
    try:
        front = application(
            config, placement, resources, num_fronts, most_starts=1
        )  # somebody reads what is wrong
        serve.run(front, name=APPLICATION, route_prefix="/")
    except SILENT as error:
        reason = front_error() or first_line(error)
        tell_nothing_served()
        with suppress(Exception):
            serve.delete(APPLICATION)
        raise ClusterError(f"the front cannot start: {reason}") from None


def application(
    config: ServerConfig,
    placement: str,
    resources: dict[str, float],
    num_fronts: int,
    most_starts: int = _MOST_STARTS,
) -> Any:
    """The front, for Ray Serve. resources: of Ray's, that each of the fronts needs. most_starts:
    that may fail before any has succeeded; it is given up then.
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
        max_constructor_retry_count=most_starts,
    )
    return front.bind(config, placement, num_fronts)


def serve_application(arguments: dict[str, Any]) -> Any:
    """The front, for configuration files of Ray Serve's. arguments: fields of `ServerConfig`,
    "placement" and "fronts".
    """
    given = dict(arguments)
    placement, num_fronts = given.pop("placement", DEFAULT_PLACEMENT), given.pop("fronts", 1)
    try:
        config = ServerConfig(**given)
    except (TypeError, ValueError) as error:
        raise ClusterError(
            f"the arguments of the application {APPLICATION} cannot be used: {error}"
        ) from None
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
