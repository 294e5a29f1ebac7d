"""Commands find the server that this user runs on this machine, at whatever port."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, serving

from coserve.server.lifecycle.running import (
    RunningServer,
    announced,
    reachable_url,
    running_servers,
)

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "servers"


@pytest.fixture(scope="module")
def served(run_dir: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSERVE_RUN_DIR", str(run_dir))
        with serving() as running:
            yield running


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for this process and its commands alone."""
    monkeypatch.setenv("COSERVE_RUN_DIR", str(tmp_path / "servers"))
    return tmp_path / "servers"


def command(
    run_dir: Path, *arguments: str, question: str = "", **more: str
) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "COSERVE_RUN_DIR": str(run_dir), **more}
    done = subprocess.run(
        [sys.executable, "-m", "coserve", *arguments],
        input=question,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_commands_find_the_server_and_say_which(served: Served, run_dir: Path):
    said = f"using the server at {served.url} (small)\n"
    status, out, err = command(run_dir, "models", "--json")
    assert (status, err) == (0, said) and "small" in out
    assert command(run_dir, "jobs", "--json")[::2] == (0, said)
    status, out, err = command(run_dir, "chat", "--max-tokens", "3", question="Hello\n")
    assert (status, err) == (0, said) and out


def test_what_the_user_says_goes_before(served: Served, run_dir: Path):
    for arguments, more in (
        (("models", "--url", "http://127.0.0.1:1"), {}),
        (("models",), {"COSERVE_URL": "http://127.0.0.1:1"}),
    ):
        status, _, err = command(run_dir, *arguments, **more)
        assert status == 1 and err.startswith("error: no server at http://127.0.0.1:1"), err


def test_of_several_servers_the_user_names_one(here: Path):
    first = RunningServer(url="http://127.0.0.1:2", model="a", pid=1)
    with announced(first), announced(RunningServer(url="http://127.0.0.1:3", model="b", pid=2)):
        status, _, err = command(here, "models")
        assert (status, err) == (
            1,
            "error: 2 servers run here: http://127.0.0.1:2 (a), http://127.0.0.1:3 (b); choose "
            "one with --url or COSERVE_URL\n",
        )
    assert running_servers() == []


def test_one_at_the_usual_address_is_the_one_that_is_meant(here: Path):
    usual = RunningServer(url="http://127.0.0.1:8000", model="a", pid=1)
    with announced(usual), announced(RunningServer(url="http://127.0.0.1:3", model="b", pid=2)):
        assert "servers run here" not in command(here, "models")[2]


def test_a_killed_server_is_not_found_any_more(here: Path):
    with serving() as served:
        assert [server.url for server in running_servers()] == [served.url]
        served.process.send_signal(signal.SIGKILL)
        served.process.wait(60)
        served.wait_until(lambda: running_servers() == [])
    assert list(here.iterdir()) == []


def test_a_server_that_ends_takes_its_file_along(here: Path):
    with serving() as served:
        [path] = here.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600 and here.stat().st_mode & 0o777 == 0o700
        assert json.loads(path.read_text())["url"] == served.url
    assert list(here.iterdir()) == []


def test_files_that_are_none_are_passed_over(here: Path):
    here.mkdir()
    (here / "1.json").write_text("{")
    (here / "2.json").mkdir()
    assert running_servers() == []
    with announced(
        RunningServer(url="http://127.0.0.1:3", model="b", pid=2)
    ):  # whose name is taken
        assert running_servers() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_files_of_other_users_are_not_believed(here: Path):
    here.mkdir()
    with announced(RunningServer(url="http://127.0.0.1:3", model="b", pid=2)):
        os.chown(here / "2.json", 12345, -1)
        assert running_servers() == []
        os.chown(here / "2.json", 0, -1)
        os.chown(here, 12345, -1)
        assert running_servers() == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("192.168.1.2", "http://192.168.1.2:5"),
    ],
)
def test_a_server_on_every_address_is_reached_at_this_machines_own(host: str, url: str):
    assert reachable_url("http", host, 5) == url
