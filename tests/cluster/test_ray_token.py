"""A cluster of the command's own works for those alone who have its token."""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from cluster.ray_world import free_port

from coserve.cluster.ray.token import TOKEN_FILE

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'"
    ),
]

ASK = """
import sys
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import GcsClient
try:
    print(sorted(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"coserve", timeout=5.0)))
except AuthenticationError:
    print("refused")
"""


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a machine with a home of its own, and its token alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return kept | {"COSERVE_HOME": str(home), "HOME": str(home), "OMP_NUM_THREADS": "1"}


@contextmanager
def cluster(directory: Path, ray_port: int) -> Iterator[tuple[str, str]]:
    """Start a front and one node; yield the line that says where they are, and the front's URL."""
    options = {
        "ray-port": ray_port,
        "port": free_port(),
        "nodes": 1,
        "home": directory / "shared",
        "device": "cpu",
    }
    options |= {"memory": "16MB", "dtype": "float32"}
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "coserve",
                "cluster",
                "up",
                "tiny",
                *(f"--{name}={each}" for name, each in options.items()),
            ],
            env=environment(directory / "first"),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (directory / "log").read_text()
            assert process.stdout.readline() == "1 node is ready\n"
            yield line, f"http://127.0.0.1:{options['port']}"
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, (directory / "log").read_text()


def run(home: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
    )


def processes_of(port: int) -> list[Path]:
    """Return Ray's processes, and the workers that it has started."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f":{port}".encode()
                in (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
            ):
                found.append(each)
        except OSError:
            pass
    return found


def test_nobody_without_the_token_can_have_it_do_anything(tmp_path: Path):
    port = free_port()
    address = f"127.0.0.1:{port}"
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    with cluster(tmp_path, port) as (line, url):
        path = first / TOKEN_FILE
        assert re.search(rf"coserve cluster up --address {address}, and the token in {path}$", line)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert run(second, "-c", ASK, address).stdout == "refused\n"
        for command in (("status",), ("drain", "node-1"), ("up",)):
            said = run(second, "-m", "coserve", "cluster", *command, "--address", address)
            assert said.returncode == 1 and "Traceback" not in said.stderr
            last = said.stderr.splitlines()[-1]  # after Ray's own words
            assert (
                f"needs a token, and this machine has another or none: copy {TOKEN_FILE} from"
                in last
            )
        own = subprocess.run(
            [sys.executable, "-c", ASK, address],
            env=environment(first) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)},
            capture_output=True,
            text=True,
        )
        assert "b'served'" in own.stdout
        assert (
            "0 waiting for a node"
            in run(first, "-m", "coserve", "cluster", "status", "--address", address).stdout
        )
        (second / TOKEN_FILE).write_text(path.read_text())
        (second / TOKEN_FILE).chmod(0o600)
        assert (
            "0 waiting for a node"
            in run(second, "-m", "coserve", "cluster", "status", "--address", address).stdout
        )
        (second / TOKEN_FILE).write_text("f" * 64)
        assert (
            "has another or none"
            in run(second, "-m", "coserve", "cluster", "status", "--address", address).stderr
        )
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["choices"], answer.text
        found = processes_of(port)
        assert len(found) >= 3
        for each in found:
            assert (
                path.read_bytes()
                not in (each / "environ").read_bytes() + (each / "cmdline").read_bytes()
            )
