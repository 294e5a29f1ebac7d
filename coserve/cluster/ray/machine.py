"""A machine of Ray's, while a context lasts: the first of a new cluster, or one that joins."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import ray
from ray.exceptions import AuthenticationError, RayError, RpcError
from ray.experimental.internal_kv import GcsClient, _internal_kv_del, _internal_kv_put

from coserve.cluster.ray.errors import last_error
from coserve.cluster.ray.token import refused
from coserve.errors import ClusterError
from coserve.version import VERSION

# Ray's resource of which a machine has as many as devices for nodes.
DEVICE = "coserve_device"
DEFAULT_PORT = 6379
RAY_SETTINGS = {
    # Ray lowers the priority of its workers; the front and the engines need their share of CPUs.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
        "coserve.cluster.front.lost_front:http_middlewares"
    ),
}
# Nodes have drained when a machine leaves: Ray would wait for actors that do not end.
_OWN_SETTINGS = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
# Ray's label of the machine that a command has started, among those of the cluster.
_LABEL = "coserve-machine"
_CONNECT_S, _START_S = 3.0, 300.0
# Key of the front's message to machines that would join, in Ray's store of the cluster.
_KEY, _NAMESPACE = b"served", b"coserve"


class ClusterKeys:
    """Keys of this project in Ray's store of the cluster at an address, to which this machine need
    not belong. Implements `ClaimStore`.
    """

    def __init__(self, address: str) -> None:
        """Connect to the store.

        Raises:
            ClusterError: There is no cluster.
        """
        check_address(address)
        self._address = address
        with self._asking():
            self._gcs = GcsClient(address=address)

    def keys(self, prefix: bytes) -> list[bytes]:
        with self._asking():
            return list(self._gcs.internal_kv_keys(prefix, _NAMESPACE, timeout=_CONNECT_S))

    def get(self, key: bytes) -> bytes | None:
        with self._asking():
            value: bytes | None = self._gcs.internal_kv_get(key, _NAMESPACE, timeout=_CONNECT_S)
            return value

    def put(self, key: bytes, value: bytes) -> None:
        with self._asking():
            self._gcs.internal_kv_put(key, value, True, _NAMESPACE, timeout=_CONNECT_S)

    def add(self, key: bytes, value: bytes) -> bool:
        with self._asking():
            return bool(
                self._gcs.internal_kv_put(key, value, False, _NAMESPACE, timeout=_CONNECT_S)
            )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError:
            raise refused(self._address) from None
        except RpcError as error:
            raise ClusterError(
                f"what listens at {self._address} does not answer as a Ray cluster does: {error}"
            ) from None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a front to machines that would join."""

    model: str
    """Model that the cluster serves."""
    version: str = VERSION
    """Version of coserve."""
    num_ranks: int = 1
    """Number of ranks of each node."""


def announce_served(served: Served | None) -> None:
    """Have `served_at` return this; None: nothing is served. For processes that are connected to
    the cluster.
    """
    if served is None:
        _internal_kv_del(_KEY, namespace=_NAMESPACE)
    else:
        _internal_kv_put(_KEY, msgspec.json.encode(served), namespace=_NAMESPACE)


def served_at(address: str) -> Served | None:
    """Return what the cluster at an address serves; None: nothing yet. This machine does not join
    it.

    Raises:
        ClusterError: There is no cluster.
    """
    message = ClusterKeys(address).get(_KEY)
    return None if message is None else msgspec.json.decode(message, type=Served)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of Ray's machines."""

    address: str
    """Address of its cluster."""
    id: str | None
    """Ray's id; None: this machine does not belong to the cluster."""


@contextmanager
def ray_machine(
    address: str | None, num_devices: int, *, host: str, port: int = DEFAULT_PORT
) -> Iterator[Machine]:
    """Have this machine belong to Ray while the context lasts: as the first of a new cluster, or as
    one that joins.

    Args:
        address: Address of the cluster to join; None: a new cluster.
        num_devices: Number of this machine's devices.
        host: Host at which a new cluster is reached.
        port: Port of a new cluster.

    Raises:
        ClusterError: There is no cluster at the address, something else listens where a new one
            would, or Ray cannot be started.
    """
    if address is not None:
        check_address(address)
        if not num_devices:
            yield Machine(address=address, id=None)
            return
        command = ["--address", address]
    else:
        # Ray's machines find one another by an address that each can reach.
        own = (
            "127.0.0.1"
            if host in ("127.0.0.1", "localhost", "::1")
            else ray.util.get_node_ip_address()
        )
        address = f"{own}:{port}"
        _check_free(address)
        command = [
            "--head",
            "--node-ip-address",
            own,
            "--port",
            str(port),
            "--include-dashboard=false",
        ]
    resources = msgspec.json.encode({DEVICE: num_devices}).decode()
    label = secrets.token_hex(8)
    program = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
    ]
    process = subprocess.Popen(
        [*program, *command, "--resources", resources, "--labels", f"{_LABEL}={label}"],
        env=_OWN_SETTINGS | RAY_SETTINGS | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # a terminal's Ctrl-C would end Ray before anything could leave it
    )
    try:
        yield Machine(address=address, id=_wait_for_ray(process, address, label))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_START_S)
        process.kill()


def _check_free(address: str) -> None:
    """Raise ClusterError if something listens at an address."""
    try:
        check_address(address)
    except ClusterError:
        return
    raise ClusterError(
        f"something listens at {address} already: join that cluster with --address {address}, or "
        f"start another with "
        "--ray-port"
    )


def _wait_for_ray(process: "subprocess.Popen[str]", address: str, label: str) -> str:
    """Wait until the cluster has the machine that this process makes, and return Ray's id of it."""
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            assert process.stderr is not None
            raise ClusterError(
                f"Ray cannot be started here: {last_error(process.stderr.read()) or 'see its log'}"
            )
        with suppress(ClusterError, RayError, RuntimeError):
            check_address(address)
            for id, node in (
                GcsClient(address=address).get_all_node_info(timeout=_CONNECT_S).items()
            ):
                if node.labels.get(_LABEL) == label:
                    machine: str = id.hex()
                    return machine
        time.sleep(0.2)
    raise ClusterError(f"Ray has not started within {_START_S:g} s")


def check_address(address: str) -> None:
    """Raise ClusterError unless something listens at an address."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ClusterError(
            f"--address must be HOST:PORT, as the first coserve cluster up prints it, not "
            f"{address!r}"
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"there is no Ray cluster at {address}: {error.strerror or error}; start one with "
            f"coserve cluster up "
            "there, or leave out --address to start one here"
        ) from None
