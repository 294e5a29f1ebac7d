"""`coserve cluster`: mistakes are one line, and start nothing."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import failure

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'"
)
# Python that hides Ray, as if it were not installed.
WITHOUT_RAY = (
    "import coserve.cli.commands.cluster as command; find = command.find_spec; "
    "command.find_spec = lambda name: None if name == 'ray' else find(name)"
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give commands a home of their own: the token that one makes there would be used by the
    clusters of other tests, which have none.
    """
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("command", ["up", "status"])
def test_without_ray_it_says_how_to_get_it(tmp_path: Path, command: str):
    assert "pip install 'coserve[cluster]'" in failure(
        tmp_path, "cluster", command, before=WITHOUT_RAY
    )


def test_a_cluster_that_is_there_has_its_port(tmp_path: Path):
    said = failure(tmp_path, "cluster", "up", "--address", "127.0.0.1:1", "--ray-port", "7")
    assert (
        "--ray-port applies to a cluster that this command starts: remove it, or --address" in said
    )


@pytest.mark.parametrize("arguments", [(), ("node-1", "--here")])
def test_a_drain_is_of_one_node_or_of_all_here(tmp_path: Path, arguments: tuple[str, ...]):
    assert "name one NODE to drain, or use --here for all nodes" in failure(
        tmp_path, "cluster", "drain", *arguments
    )


@pytest.mark.cluster
@needs_ray
def test_a_second_cluster_does_not_take_another_program_for_its_own_ray(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = failure(
            tmp_path, "cluster", "up", "--device", "cpu", "--ray-port", address.rpartition(":")[2]
        )
    assert (
        f"something listens at {address} already: join that cluster with --address {address}, or "
        f"start" in said
    )


@pytest.mark.cluster
@needs_ray
def test_a_cluster_whose_port_another_program_has_is_not_begun(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failure(tmp_path, "cluster", "up", "--device", "cpu", "--port", str(port))
    assert (
        f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another --port or "
        f"--host" in said
    )


@pytest.mark.cluster
@needs_ray
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("up", "--address", "127.0.0.1:1"),
            "there is no Ray cluster at 127.0.0.1:1: Connection refused",
        ),
        (("up", "--address", "nowhere"), "--address must be HOST:PORT"),
        (("up", "--placement", "best"), "placement 'best' is not one of "),
        (
            ("up", "--ssl-certfile", "a.pem"),
            "--ssl-certfile a.pem cannot be used: No such file or directory",
        ),
        (("up", "--record", "a.rec"), "--record is for coserve up"),
        (
            ("up", "--files-url", "ftp://127.0.0.1:1/x"),
            "the files at ftp://127.0.0.1:1/x cannot be used: [Errno 111]",
        ),
        (("up", "--files-url", "gopher://here/x"), "cannot be used: Protocol not known: gopher"),
        (("status", "--address", "127.0.0.1:1"), "there is no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str):
    assert message in failure(tmp_path, "cluster", *arguments)
