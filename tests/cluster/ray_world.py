"""A real Ray cluster on this machine: a head, and machines with one device each; and ways to harm
them.
"""

import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from certificates import make_certificate
from forked import preload
from openai import DefaultHttpxClient, OpenAI

from coserve.server.config import ServerConfig
from coserve.server.tenancy.keys import digest_of

HEAD = {"coserve_head": 1.0}
START_S = 280.0
KEY, OTHER_KEY = "a key of this test alone", "another one"
# One answers, the other stands by.
NUM_FRONTS = 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class RayWorld:
    """The cluster, its front's URL, and ways to harm it. `times` has the seconds of recoveries, by
    what was killed.
    """

    def __init__(self, cluster: Any, config: ServerConfig, homes: Path | None = None) -> None:
        """Use a cluster. homes: directory in which each machine has a home of its own (None: the
        usual one).
        """
        from coserve.cluster.ray import commands as ray_commands

        self.ray_commands, self.cluster, self.config, self.homes = (
            ray_commands,
            cluster,
            config,
            homes,
        )
        self._num_machines = 0
        self.url = f"https://127.0.0.1:{config.port}/v1"
        assert config.ssl_certfile is not None
        self._trusting = ssl.create_default_context(cafile=config.ssl_certfile)
        self._clients: list[OpenAI] = []
        self.client = self.client_of(KEY)
        self.machines: list[Any] = []

    def client_of(self, key: str) -> OpenAI:
        """Return a client with a key."""
        pool = DefaultHttpxClient(verify=self._trusting)
        made = OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=120, http_client=pool)
        self._clients.append(made)
        return made

    def close(self) -> None:
        """Close the connections of all clients."""
        for client in self._clients:
            client.close()

    def add_machine(self) -> None:
        from coserve.cluster.ray.machine import DEVICE

        own = {}
        if self.homes is not None:
            home = self.homes / f"machine-{self._num_machines}"
            own = {"COSERVE_HOME": str(home)}
        self._num_machines += 1
        self.machines.append(self.cluster.add_node(num_cpus=1, resources={DEVICE: 1}, env_vars=own))

    def remove_machines(self) -> None:
        """Remove all machines, at the end."""
        for machine in self.machines:
            self.cluster.remove_node(machine)
        self.machines.clear()
        self.until(lambda: sum(each["Alive"] for each in self.members_of_ray()) == 1)

    # -- questions ----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ray_commands.status()
        return found

    def members_of_ray(self) -> list[dict[str, Any]]:
        """Return all machines that Ray has ever had."""
        import ray

        found: list[dict[str, Any]] = ray.nodes()
        return found

    def members(self) -> tuple[int, list[str]]:
        """Return the number of machines that Ray has ever had, and the nodes of the front."""
        return len(self.members_of_ray()), [each["name"] for each in self.status()["nodes"]]

    def num_ready(self) -> int:
        from coserve.errors import CoserveError

        with suppress(CoserveError):
            return sum(each["state"] == "ready" for each in self.status()["nodes"])
        return 0

    def lives(self) -> frozenset[tuple[Any, ...]]:
        """Return the processes that answer now: one that dies is replaced by another process."""
        from coserve.errors import CoserveError

        with suppress(CoserveError):
            found = self.status()
            nodes = [each for each in found["nodes"] if each["state"] == "ready"]
            return frozenset(
                [("front", found["pid"]), *((n["name"], n["pid"], n["restarts"]) for n in nodes)]
            )
        return frozenset()

    def has_recovered(self, before: frozenset[tuple[Any, ...]]) -> bool:
        """Return whether all processes live, and one of them is new."""
        now = self.lives()
        return len(now) == len(self.machines) + 1 and now != before

    def until(self, question: Callable[[], Any], *, limit_s: float = START_S) -> Any:
        until_s = time.monotonic() + limit_s
        while not (found := question()):
            assert time.monotonic() < until_s, "it has not come true"
            time.sleep(0.2)
        return found

    # -- what may befall it -----------------------------------------------------------------

    def kill_engine(self, number: int) -> None:
        """Kill the process that holds the model; its actor has another one forked."""
        _kill(engine_of(self._pid_of_node(number)))

    def kill_actor(self, number: int) -> None:
        """Kill the actor's process; Ray starts it again."""
        _kill(self._pid_of_node(number))

    def end_actor(self, number: int) -> None:
        """End an actor so that Ray does not start it again."""
        import ray

        from coserve.cluster.ray.nodes import NAMESPACE

        names = [each["name"] for each in self._nodes()]
        ray.kill(ray.get_actor(names[number % len(names)], NAMESPACE))

    def kill_machine(self, number: int) -> None:
        """Kill all processes of a machine of Ray; another machine takes its place."""
        machine = self.machines.pop(number % len(self.machines))
        self.cluster.remove_node(machine, allow_graceful=False)
        self.add_machine()

    def remove_machine_of(self, job: str) -> None:
        """Remove the machine that trains a job; none takes its place."""
        pid = self.until(
            lambda: [each["pid"] for each in self._nodes() if job in each["jobs"] and each["pid"]]
        )[0]
        raylet = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        (machine,) = [
            each
            for each in self.machines
            if any(
                part.process.pid == raylet
                for parts in each.all_processes.values()
                for part in parts
            )
        ]
        self.machines.remove(machine)
        self.cluster.remove_node(machine, allow_graceful=False)

    def kill_front(self, number: int) -> None:
        """Kill Ray Serve's replica, with the store and all connections."""
        _kill(self.until(lambda: self._front_pid()))

    def drain_and_kill_front(self, number: int) -> None:
        """Drain a node with jobs, which move; the front that comes then uses it again."""
        node = max(
            self.until(self._nodes), key=lambda each: len(each["jobs"]) * (each["state"] == "ready")
        )
        self.ray_commands.drain(node["name"], START_S)
        (drained,) = [each for each in self.status()["nodes"] if each["name"] == node["name"]]
        assert (drained["state"], drained["jobs"]) == ("draining", [])
        self.kill_front(number)

    def fronts(self) -> set[int]:
        """Return the processes of fronts: the one that answers, and those that stand by."""
        found = subprocess.run(
            ["pgrep", "-f", "^ray::ServeReplica:coserve:front"], capture_output=True, text=True
        )
        return set(map(int, found.stdout.split()))

    def num_fronts(self) -> int:
        """Return the number of fronts that have started, whichever of them answers."""
        from ray import serve

        front = (
            serve.status()
            .applications[self.ray_commands.APPLICATION]
            .deployments[self.ray_commands.FRONT]
        )
        return int(front.replica_states.get("RUNNING", 0))

    def front_that_answers(self) -> int | None:
        """Return the process of the front that answers; None while there is none."""
        return self._front_pid()

    def _pid_of_node(self, number: int) -> int:
        ready = self.until(lambda: [each for each in self._nodes() if each["state"] == "ready"])
        pid: int = ready[number % len(ready)]["pid"]
        return pid

    def _nodes(self) -> list[dict[str, Any]]:
        from coserve.errors import CoserveError

        with suppress(CoserveError):
            found: list[dict[str, Any]] = self.status()["nodes"]
            return found
        return []

    def _front_pid(self) -> int | None:
        from coserve.errors import CoserveError

        with suppress(CoserveError):
            pid: int = self.status()["pid"]
            return pid
        return None


def engine_of(actor: int) -> int:
    """Return the process that reads what a node's actor writes to its standard input; they have no
    other kinship.
    """
    written = {
        os.readlink(file)
        for file in Path(f"/proc/{actor}/fd").iterdir()
        if file.exists() or file.is_symlink()
    }
    pipes = {each for each in written if each.startswith("pipe:")}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != actor and os.readlink(process / "fd" / "0") in pipes:
                return int(process.name)
    raise AssertionError(f"the actor {actor} has no engine")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return list(map(int, found.stdout.split()))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def write_keys(path: Path, key: str) -> None:
    """Write the one key that the front takes, an operator's."""
    path.write_text(f'[keys]\n"{digest_of(key)}" = "ann"\n[tenants.ann]\noperator = true\n')
    path.chmod(0o600)


@contextmanager
def ray_head() -> Iterator[Any]:
    """Start a cluster of Ray without devices, which this process and commands can ask."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    preload("coserve.cluster.ray.front")
    from ray.cluster_utils import Cluster

    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray.machine import RAY_SETTINGS

    os.environ.update(RAY_SETTINGS)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": HEAD, "include_dashboard": False},
    )
    try:
        ray_commands.connect(cluster.address)
        yield cluster
    finally:
        ray_commands.disconnect()
        cluster.shutdown()


@contextmanager
def ray_world(
    cluster: Any,
    home: Path,
    num_machines: int = 3,
    *,
    placement: str = os.environ.get("COSERVE_CLUSTER_PLACEMENT", "round-robin"),
    homes: Path | None = None,
    num_fronts: int = NUM_FRONTS,
    **settings: Any,
) -> Iterator[RayWorld]:
    """Start nodes on machines that the cluster of a `ray_head` has for as long, and wait until they
    are ready.

    Args:
        cluster: The cluster.
        home: The front's home.
        num_machines: Number of machines.
        placement: Name of the placement; by default nodes take turns, so that tests reach all
            nodes.
        homes: Directory of the machines' homes.
        num_fronts: Number of fronts.
        settings: Options of the server.
    """
    from coserve.cluster.ray import commands as ray_commands
    from coserve.cluster.ray import front as ray_front

    usual: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float32",
        "memory_bytes": 16_000_000,
        "device": "cpu",
    }
    config = ServerConfig(
        **usual | {"home": str(home), "port": free_port(), "tpot_s": 1.0, "ttft_s": 5.0} | settings
    )
    cert, key = make_certificate(home)
    write_keys(home / "keys.toml", KEY)
    tls: dict[str, Any] = {
        "ssl_certfile": str(cert),
        "ssl_keyfile": str(key),
        "api_keys_file": str(home / "keys.toml"),
    }
    config = replace(config, **tls)
    world = RayWorld(cluster, config, homes)
    try:
        for _ in range(num_machines):
            world.add_machine()
        ray_front.deploy(config, placement, resources={"coserve_head": 0.01}, num_fronts=num_fronts)
        ray_commands.wait_for_nodes(lambda: False)
        yield world
        world.close()
        ray_commands.undeploy()
    finally:
        world.remove_machines()
