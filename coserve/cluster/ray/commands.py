"""What commands ask of a cluster, and of its front, which `ray_front` deploys. Ray is touched here,
there, in `ray_router`, `ray_machine`, `ray_nodes` and `node_actor` alone.

Importing this does not import PyTorch, nor what a front runs: a command that only asks begins at
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
from coserve.cluster.ray.machine import DEVICE, ClusterKeys, served_at, tell_served
from coserve.cluster.ray.nodes import NAMESPACE, ask_nodes, node_actors
from coserve.errors import ClusterError, FrontSilentError

_log = logging.getLogger(__name__)

APPLICATION, FRONT = "coserve", "front"
_CALL_S = 10.0
# What a front's end takes after its requests: checkpoints, and what it still has to write.
STOP_S = 30.0
# What Ray, Ray Serve and their connections raise when they do not answer.
SILENT = (RayError, RayServeException, TimeoutError, RuntimeError)


def connect(address: str) -> None:
    """Have this process ask the cluster. ClusterError if it cannot be reached, or asks for another
    token.
    """
    ClusterKeys(address)  # it says at once what `ray.init` tries for 20 s
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
        # Ray's own, which it sets here, prints where the process was, and ends it without anything
        # of ours.
        if own is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, own)


def disconnect() -> None:
    """The inverse."""
    ray.shutdown()


def served_models() -> list[str]:
    """What the nodes of the cluster serve; empty if it has no front. ClusterError if Ray does not
    tell.
    """
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
    except SILENT as error:
        raise FrontSilentError(
            f"Ray Serve does not say what it runs: {first_line(error)}"
        ) from None


def this_machine() -> dict[str, float]:
    """Ray's resource that binds a front to this machine, where its home is."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def undeploy(drain_s: float = 0.0) -> None:
    """End the front, when its requests are over, or after this time, with checkpoints of its jobs;
    and the nodes. What else runs in the cluster stays, and Ray Serve for it. Nobody else begins to
    serve until all of it has ended.
    """
    with ExitStack() as claim:
        with suppress(ClusterError, *SILENT):  # Ray itself may be gone
            claim.enter_context(
                DeployClaim(ClusterKeys(ray.get_runtime_context().gcs_address), at_once=True)
            )
        tell_nothing_served()
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
    """Ray Serve itself tells a front of its end when all requests are over, or by killing it."""
    for wait_s in (drain_s, 0.0):
        try:
            handle = serve.get_app_handle(APPLICATION)
            handle.describe.remote().result(timeout_s=_CALL_S)  # it knows all fronts then
            ends = handle.broadcast("end", wait_s).results(
                timeout_s=wait_s + STOP_S, return_exceptions=True
            )
        except (
            KeyboardInterrupt
        ):  # the second: nobody waits for requests any more, but for checkpoints
            continue
        except SILENT as error:
            _log.info("no front could be asked to end: %s", first_line(error))
            return
        for end in ends:
            if isinstance(end, Exception):
                _log.warning("a front has not ended in good order: %s", first_line(end))
        return


def tell_nothing_served() -> None:
    """See `tell_served`; where Ray is gone, nothing."""
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
    """What the front says of its nodes. ClusterError if there is none that answers."""
    return _Front().status()


def drain(name: str, limit_s: float) -> None:
    """Have a node get nothing more, and its jobs continue on others. ClusterError if that cannot
    be.
    """
    try:
        _Front().drain([name], limit_s)
    except FrontSilentError as error:
        raise ClusterError(f"the node {name} has not drained: {error}") from None


def drain_machines(machine: str | None, say: Callable[[str], None]) -> None:
    """Have all nodes of a machine, by Ray's id, that is about to leave drain; None: of the machine
    of this process. See `joining.drain_machines`.
    """
    joining.drain_machines(_Front(), _machines_here() if machine is None else [machine], say=say)


def _machines_here() -> Collection[str]:
    """Ray's ids; several machines of Ray's may be on one."""
    here = ray.util.get_node_ip_address()
    return [
        each["NodeID"]
        for each in ray.nodes()
        if each["Alive"] and each["NodeManagerAddress"] == here
    ]


def wait_for_nodes(
    is_ended: Callable[[], bool], machine: str | None = None, num_devices: int | None = None
) -> int | None:
    """See `joining.wait_for_nodes`. num_devices: of the machine (None: all of the cluster)."""

    def number() -> int:
        return int(ray.cluster_resources().get(DEVICE, 0)) if num_devices is None else num_devices

    return joining.wait_for_nodes(_Front(), machine, number, is_ended)


def reload_keys() -> None:
    """Have the front read its keys' file again. ClusterError if it does not answer."""
    try:
        _ask_front("reload_keys")
    except FrontSilentError as error:
        raise ClusterError(f"the keys have not been read again: {error}") from None
