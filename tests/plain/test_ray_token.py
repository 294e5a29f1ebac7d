"""The token of a Ray cluster: where it comes from, and who can read it."""

import os
import stat
from pathlib import Path

import pytest

from coserve.cluster.ray.token import TOKEN_FILE, check_reach, refused, token_in_use, use_token
from coserve.errors import ClusterError

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path / "home"))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # what is set afterwards is undone, too
        monkeypatch.delenv(name)
    return tmp_path / "home"


def test_a_new_cluster_makes_one_that_nobody_else_reads(home: Path):
    use_token(creates=True)
    path = home / TOKEN_FILE
    token = path.read_text()
    assert len(token) == 64 and int(token, 16)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(home.stat().st_mode) == 0o700
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", str(path))
    assert token_in_use() == path
    use_token(creates=True)
    assert path.read_text() == token, "made once"


def test_a_machine_that_joins_uses_what_it_was_given(home: Path):
    use_token(creates=False)
    assert "RAY_AUTH_MODE" not in os.environ and token_in_use() is None, "the cluster may have none"
    home.mkdir()
    (home / TOKEN_FILE).write_text("a" * 64)
    (home / TOKEN_FILE).chmod(0o600)
    use_token(creates=False)
    assert token_in_use() == home / TOKEN_FILE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_can_read_is_refused(home: Path, mode: int):
    use_token(creates=True)
    (home / TOKEN_FILE).chmod(mode)
    for name in VARIABLES:
        os.environ.pop(name, None)
    with pytest.raises(ClusterError, match="chmod 600"):
        use_token(creates=True)


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_rays_own_variables_come_first(home: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "/a/file/or/a/token")
    use_token(creates=True)
    assert os.environ["RAY_AUTH_MODE"] == "token" and os.environ[name] == "/a/file/or/a/token"
    assert not home.exists()


def test_tokens_can_be_turned_off_where_nobody_else_reaches_the_cluster(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token(creates=True)
    assert not home.exists()
    for host in ("127.0.0.1", "localhost", "::1"):
        check_reach(host)
    for host in ("0.0.0.0", "192.0.2.7", "::"):
        with pytest.raises(ClusterError, match="RAY_AUTH_MODE=disabled turns off"):
            check_reach(host)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_reach("0.0.0.0")


def test_what_a_machine_needs_is_said(home: Path):
    said = str(refused("192.0.2.7:6379"))
    assert "192.0.2.7:6379 needs a token" in said and str(home / TOKEN_FILE) in said


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ClusterError, match="the token of the cluster"):
        use_token(creates=True)
