"""Secrets that the environment brings show in no process of a server."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from served import model_directory

from coserve.secret_variables import take_variable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
SECRETS = {
    "COSERVE_API_KEYS": "ann=key-of-ann-0123 ben=key-of-ben-4567",
    "COSERVE_API_KEY": "a-client's-key",
    "COSERVE_DATABASE": "sqlite:///{home}/password-of-a-database.db",
}
WORDS = (b"key-of-ann", b"key-of-ben", b"a-client's-key", b"password-of-a-database")


@contextmanager
def server(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `coserve up` with the secrets in its environment, as a program of its own; and its URL."""
    given = {name: value.format(home=home) for name, value in SECRETS.items()}
    command = [
        sys.executable,
        "-m",
        "coserve",
        "up",
        str(model_directory()),
        "--port",
        "0",
        "--memory",
        "16MB",
    ]
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(
            [*command, "--home", str(home), "--api-key", "cy=key-of-cy"],
            env=os.environ | given | {"OMP_NUM_THREADS": "1", "A_LATER_ONE": "stays"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"(http://\S+)/v1", line)
            assert found, (line, (home / "log").read_text())
            yield process, found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for each in children for child in each.read_text().split()]
    return [pid, *(each for child in found for each in family(child))]


def check_hidden(pids: list[int]) -> None:
    for pid in pids:
        shown = Path(f"/proc/{pid}/environ").read_bytes()
        assert not [word for word in WORDS if word in shown], (
            pid,
            Path(f"/proc/{pid}/cmdline").read_bytes(),
        )


def status(url: str, key: str) -> int:
    try:
        return httpx.get(
            f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30
        ).status_code
    except httpx.HTTPError:
        return 0


def test_no_process_of_a_server_shows_them(tmp_path):
    with server(tmp_path) as (process, url):
        pids = family(process.pid)
        assert len(pids) >= 3, "the server, the one that forks, the engine"
        check_hidden(pids)
        assert b"A_LATER_ONE=stays" in Path(f"/proc/{process.pid}/environ").read_bytes()
        keys = ("key-of-ann-0123", "key-of-ben-4567", "key-of-cy", "a-client's-key")
        assert [status(url, key) for key in keys] == [200, 200, 200, 401]
        assert (tmp_path / "password-of-a-database.db").exists()
        os.kill(
            pids[1], signal.SIGKILL
        )  # the next is a program, started with this process's environment
        until_s = time.monotonic() + 60
        while len(new := set(family(process.pid)) - set(pids)) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        check_hidden([process.pid, *new])


def test_a_variable_is_taken_once(monkeypatch):
    monkeypatch.setenv("COSERVE_TAKEN", "hidden")
    assert take_variable("COSERVE_TAKEN") == "hidden"
    assert take_variable("COSERVE_TAKEN") == "" and "COSERVE_TAKEN" not in os.environ


def test_others_stay_as_they_are():
    code = (
        "from coserve.secret_variables import take_variable\n"
        "assert take_variable('SECRET') == 'a=b' and take_variable('NOT_THERE') == ''\n"
        "print(open('/proc/self/environ', 'rb').read())"
    )
    environment = {
        "SECRETS": "x=1",
        "SECRET": "a=b",
        "MY_SECRET": "a=b",
        "EMPTY": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    for name, value in environment.items():
        if name != "SECRET":
            assert f"{name}={value}\\x00" in shown.stdout
    assert "SECRET=\\x00\\x00\\x00\\x00" in shown.stdout


@pytest.mark.parametrize(
    "code",
    [
        "from coserve.cli.server_options import server_config; server_config(model='tiny')",
        "from coserve.cli.server_options import server_config; server_config(model='tiny', "
        "database='sqlite://')",
        pytest.param(
            "from typer.testing import CliRunner as R; from coserve.cli.main import app; "
            "R().invoke(app, ['doctor'])",
            marks=pytest.mark.long,
        ),
    ],
)
def test_commands_take_the_database_out_of_their_environment(tmp_path: Path, code: str):
    environment = {
        "COSERVE_DATABASE": "sqlite:///none-with-a-secret.db",
        "COSERVE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    code += (
        "; import os; print('COSERVE_DATABASE' in os.environ, open('/proc/self/environ').read())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("False ") and "with-a-secret" not in shown.stdout
