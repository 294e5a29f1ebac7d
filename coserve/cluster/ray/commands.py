"""Calls of commands to a cluster and to its front, which `coserve.cluster.ray.front` deploys.

Importing this imports neither PyTorch nor what a front runs: a command that only asks begins at
once.
"""

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
from ray.serve.exceptions import RayServeException

from coserve.cluster.ray import joining
from coserve.cluster.ray.claim import DeployClaim
from coserve.cluster.ray.errors import first_line
from coserve.cluster.ray.machine import DEVICE, ClusterKeys, announce_served, served_at
from coserve.cluster.ray.nodes import NAMESPACE, ask_nodes, node_actors
from coserve.errors import ClusterError, FrontSilentError

_log = logging.getLogger(__name__)

APPLICATION, FRONT = "coserve", "front"
_CALL_S = 10.0
# Time that a front takes to end after its requests: for checkpoints and other writes.
STOP_S = 30.0
# Errors of Ray, Ray Serve and their connections when they do not answer.
SILENT = (RayError, RayServeException, TimeoutError, RuntimeError)


def connect(address: str) -> None:
    """Connect this process to the cluster.

    Raises:
        ClusterError: The cluster cannot be reached, or needs another token.
    """
    ClusterKeys(address)  # fails at once, where `ray.init` tries for 20 s
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"the Ray cluster at {address} cannot be used: {first_line(error)}"
        ) from None
    finally:
        # Ray's handler, which `ray.init` sets, prints a stack and ends the process without cleanup.
        if own is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, own)


def disconnect() -> None:
    """Disconnect this process from the cluster."""
    ray.shutdown()


def served_models() -> list[str]:
    """Return the models that the nodes of the cluster serve; none if it has no front.

    Raises:
        ClusterError: Ray does not answer.
    """
    if APPLICATION not in _applications():
        return []
    models = [each.model for each in ask_nodes() if each.model is not None]
    if not models and (served := served_at(ray.get_runtime_context().gcs_address)) is not None:
        models = [served.model]  # whose nodes are about to come
    return models or [""]


def _applications() -> list[str]:
    """Return the names of Ray Serve's applications; none where it does not run."""
    try:
        return list(serve.status().applications)
    except SILENT as error:
        raise FrontSilentError(
            f"Ray Serve does not list its applications: {first_line(error)}"
        ) from None


def this_machine() -> dict[str, float]:
    """Return Ray's resource that binds a front to this machine, where its home is."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def undeploy(drain_s: float = 0.0) -> None:
    """End the front and the nodes. Other work in the cluster continues, and Ray Serve for it. No
    other command begins to serve until all of it has ended.

    Args:
        drain_s: Seconds to wait for open requests; jobs write checkpoints after that.
    """
    with ExitStack() as claim:
        with suppress(ClusterError, *SILENT):  # Ray itself may be gone
            claim.enter_context(
                DeployClaim(ClusterKeys(ray.get_runtime_context().gcs_address), at_once=True)
            )
        # First, so that no machine joins a cluster that is ending.
        announce_nothing_served()
        _end_fronts(drain_s)
        with suppress(*SILENT):
            serve.delete(APPLICATION)
        with suppress(ClusterError, *SILENT):
            if not _applications():
                serve.shutdown()
        for actor in node_actors():
            with suppress(RayError):
                ray.kill(actor)


def _end_fronts(drain_s: float) -> None:
    """End all fronts. Ray Serve itself ends a front only after all requests, or by killing it."""
    for wait_s in (drain_s, 0.0):
        try:
            handle = serve.get_app_handle(APPLICATION)
            handle.describe.remote().result(timeout_s=_CALL_S)  # it knows all fronts then
            ends = handle.broadcast("end", wait_s).results(
                timeout_s=wait_s + STOP_S, return_exceptions=True
            )
        except (
            KeyboardInterrupt
        ):  # the second Ctrl-C: requests are not waited for any more, checkpoints are
            continue
        except SILENT as error:
            _log.info("no front could be asked to end: %s", first_line(error))
            return
        for end in ends:
            if isinstance(end, Exception):
                _log.warning("a front has not ended in good order: %s", first_line(end))
        return


def announce_nothing_served() -> None:
    """Remove what `announce_served` has written, if Ray is there."""
    with suppress(RayError):  # Ray itself may be gone
        announce_served(None)


class _Front:
    """The front that answers. Implements `FrontCalls`."""

    def status(self) -> dict[str, Any]:
        if APPLICATION not in _applications():
            raise ClusterError("the cluster has no front: start one with coserve cluster up")
        state: dict[str, Any] = _ask_front("describe")
        return state

    def drain(self, names: Sequence[str], limit_s: float) -> None:
        if (problem := _ask_front("drain", list(names), limit_s=limit_s)) is not None:
            raise ClusterError(problem)


def _ask_front(method: str, *arguments: Any, limit_s: float = _CALL_S) -> Any:
    try:
        return (
            getattr(serve.get_app_handle(APPLICATION), method)
            .remote(*arguments)
            .result(timeout_s=limit_s)
        )
    except TimeoutError:
        raise FrontSilentError(f"the front does not answer within {limit_s:.3g} s") from None
    except SILENT as error:
        raise FrontSilentError(f"the front does not answer: {first_line(error)}") from None


def status() -> dict[str, Any]:
    """Return the state of the front and its nodes.

    Raises:
        ClusterError: No front answers.
    """
    return _Front().status()


def drain(name: str, limit_s: float) -> None:
    """Drain a node: it gets nothing more, and its jobs continue on others.

    Raises:
        ClusterError: The node could not be drained within `limit_s`.
    """
    try:
        _Front().drain([name], limit_s)
    except FrontSilentError as error:
        raise ClusterError(f"the node {name} has not drained: {error}") from None


def drain_machines(machine: str | None, say: Callable[[str], None]) -> None:
    """Drain all nodes of a machine that is about to leave: `joining.drain_machines`.

    Args:
        machine: Ray's id of the machine; None: the machine of this process.
        say: Called with each line of progress.
    """
    joining.drain_machines(_Front(), _machines_here() if machine is None else [machine], say=say)


def _machines_here() -> Collection[str]:
    """Return Ray's ids of this machine, which may run several of Ray's machines."""
    here = ray.util.get_node_ip_address()
    return [
        each["NodeID"]
        for each in ray.nodes()
        if each["Alive"] and each["NodeManagerAddress"] == here
    ]


def wait_for_nodes(
    is_ended: Callable[[], bool], machine: str | None = None, num_devices: int | None = None
) -> int | None:
    """Wait until nodes are ready: `joining.wait_for_nodes`. num_devices: of the machine; None: of
    the whole cluster.
    """

    def number() -> int:
        return int(ray.cluster_resources().get(DEVICE, 0)) if num_devices is None else num_devices

    return joining.wait_for_nodes(_Front(), machine, number, is_ended)


def reload_keys() -> None:
    """Have the front read its keys' file again.

    Raises:
        ClusterError: The front does not answer.
    """
    try:
        _ask_front("reload_keys")
    except FrontSilentError as error:
        raise ClusterError(f"the keys have not been read again: {error}") from None
