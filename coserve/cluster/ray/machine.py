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

from coserve.cluster.ray.errors import last_words
from coserve.cluster.ray.token import refused
from coserve.errors import ClusterError
from coserve.version import VERSION

# Ray's resource: as many of a machine as it has devices for nodes.
DEVICE = "coserve_device"
DEFAULT_PORT = 6379
RAY_SETTINGS = {
    # Ray lets its workers have what others leave of the CPU; the front and engines are to have
    # their share.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "coserve.cluster.front.lost_front:http_middlewares",
}
# Nodes have drained when a machine leaves: Ray's own waiting would wait for what does not end.
_OWN_SETTINGS = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
# Ray's label of the machine that a command has started, among those of the cluster.
_LABEL = "coserve-machine"
_CONNECT_S, _START_S = 3.0, 300.0
# Where the front's words for machines that would join are, in what Ray keeps for a cluster as long
# as that lives.
_KEY, _NAMESPACE = b"served", b"coserve"


class ClusterKeys:
    """What Ray keeps for the cluster at an address, of ours; this machine need not be one of it.
    Implements `ClaimStore`.
    """

    def __init__(self, address: str) -> None:
        """ClusterError if there is no cluster."""
        check_address(address)
        self._address = address
        with self._asking():
            self._gcs = GcsClient(address=address)

    def keys(self, prefix: bytes) -> list[bytes]:
        """See `ClaimStore`."""
        with self._asking():
            return list(self._gcs.internal_kv_keys(prefix, _NAMESPACE, timeout=_CONNECT_S))

    def get(self, key: bytes) -> bytes | None:
        """See `ClaimStore`."""
        with self._asking():
            found: bytes | None = self._gcs.internal_kv_get(key, _NAMESPACE, timeout=_CONNECT_S)
            return found

    def put(self, key: bytes, value: bytes) -> None:
        """See `ClaimStore`."""
        with self._asking():
            self._gcs.internal_kv_put(key, value, True, _NAMESPACE, timeout=_CONNECT_S)

    def add(self, key: bytes, value: bytes) -> bool:
        """See `ClaimStore`."""
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
    """Message of a front to machines that would join. version: of coserve. num_ranks: of each
    node.
    """

    model: str
    version: str = VERSION
    num_ranks: int = 1


def tell_served(served: Served | None) -> None:
    """Have `served_at` return it; None: nothing is served. For processes that are connected to the
    cluster.
    """
    if served is None:
        _internal_kv_del(_KEY, namespace=_NAMESPACE)
    else:
        _internal_kv_put(_KEY, msgspec.json.encode(served), namespace=_NAMESPACE)


def served_at(address: str) -> Served | None:
    """What the cluster at an address serves; None: nothing yet. This machine need not be one of it,
    and is not by this. ClusterError if there is no cluster.
    """
    found = ClusterKeys(address).get(_KEY)
    return None if found is None else msgspec.json.decode(found, type=Served)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of Ray's. address: of its cluster. id: Ray's; None: this machine is none."""

    address: str
    id: str | None


@contextmanager
def ray_machine(
    address: str | None, num_devices: int, *, host: str, port: int = DEFAULT_PORT
) -> Iterator[Machine]:
    """Have this machine be one of Ray's while the context lasts: the first of a new cluster, or one
    that joins. port: of a new cluster.

    Raises:
        ClusterError: there is no cluster at the address, something else listens where a new one
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
    """ClusterError if something listens there."""
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
    """Until the cluster has the machine that this process makes; Ray's id of it."""
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            assert process.stderr is not None
            raise ClusterError(
                f"Ray cannot be started here: {last_words(process.stderr.read()) or 'see its log'}"
            )
        with suppress(ClusterError, RayError, RuntimeError):
            check_address(address)
            for id, node in (
                GcsClient(address=address).get_all_node_info(timeout=_CONNECT_S).items()
            ):
                if node.labels.get(_LABEL) == label:
                    found: str = id.hex()
                    return found
        time.sleep(0.2)
    raise ClusterError(f"Ray has not started within {_START_S:g} s")


def check_address(address: str) -> None:
    """ClusterError unless something listens there."""
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
