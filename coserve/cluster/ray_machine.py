"""A machine of Ray's, while a context lasts: the first of a new cluster, or one that joins."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import ray

from coserve.errors import ClusterError

# Ray's resource: as many of a machine as it has devices for nodes.
DEVICE = "coserve_device"
DEFAULT_PORT = 6379
# Ray lets its workers have what others leave of the CPU; the front and engines are to have their share.
AS_ALL_ELSE = {"RAY_worker_niceness": "0"}
_CONNECT_S, _START_S = 3.0, 300.0


@contextmanager
def ray_machine(address: str | None, num_devices: int, *, host: str, port: int = DEFAULT_PORT) -> Iterator[str]:
    """Have this machine be one of Ray's while the context lasts: the first of a new cluster, or one that joins. Returns
    the cluster's address.

    Raises:
        ClusterError: there is no cluster at the address, or Ray cannot be started.
    """
    if address is not None:
        check_address(address)
        if not num_devices:
            yield address
            return
        command = ["--address", address]
    else:
        # Ray's machines find one another by an address that each can reach.
        own = "127.0.0.1" if host in ("127.0.0.1", "localhost", "::1") else ray.util.get_node_ip_address()
        address = f"{own}:{port}"
        command = ["--head", "--node-ip-address", own, "--port", str(port), "--include-dashboard=false"]
    resources = msgspec.json.encode({DEVICE: num_devices}).decode()
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    process = subprocess.Popen(
        [*program, *command, "--resources", resources],
        env=AS_ALL_ELSE | os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for_ray(process, address)
        yield address
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_START_S)
        process.kill()


def _wait_for_ray(process: "subprocess.Popen[str]", address: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            assert process.stderr is not None
            lines = [line for line in process.stderr.read().splitlines() if line.strip()]
            raise ClusterError(f"Ray cannot be started here: {lines[-1] if lines else 'see its log'}")
        with suppress(ClusterError):
            check_address(address)
            return
        time.sleep(0.2)
    raise ClusterError(f"Ray has not started within {_START_S:g} s")


def check_address(address: str) -> None:
    """ClusterError unless something listens there."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ClusterError(f"--address must be HOST:PORT, as the first coserve cluster up prints it, not {address!r}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"there is no Ray cluster at {address}: {error.strerror or error}; start one with coserve cluster up "
            "there, or leave out --address to start one here"
        ) from None
