"""Keys come from the command line, the environment and a file; they are known by their digests
alone."""

import logging
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, keys_file, serving

from coserve.errors import CoserveError
from coserve.server.config import ServerConfig
from coserve.server.tenancy.keys import KeyRing, digest_of, new_key
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.limits import TenantLimits

ROOT = str(Path(__file__).parents[2])


def test_keys_come_from_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = keys_file(
        tmp_path, "[tenants.dan]\noperator = true\nmax_jobs = 3\nmax_file_bytes = '2kB'", dan="four"
    )
    monkeypatch.setenv("COSERVE_API_KEYS", f"ben=two {digest_of('three')}\nann=again")
    config = ServerConfig(
        api_keys=("ann=one",),
        api_keys_file=str(path),
        operators=("ben",),
        tenant_tokens_per_minute=100,
    )
    ring = Keys(config).ring
    found = {
        key: ring.tenant_of(key) for key in ("one", "again", "two", "three", "four", "five", "")
    }
    bare = found.pop("three")
    assert bare is not None and bare.startswith("key-")
    assert found == {
        "one": "ann",
        "again": "ann",
        "two": "ben",
        "four": "dan",
        "five": None,
        "": None,
    }
    assert ring.operators == {"ben", "dan"} and not ring.is_operator("ann")
    assert ring.limits_of("ann") == TenantLimits(tokens_per_minute=100)
    assert ring.limits_of("dan") == TenantLimits(
        tokens_per_minute=100, max_jobs=3, max_file_bytes=2000
    )
    assert "COSERVE_API_KEYS" not in os.environ, "processes that are started do not have them"


def test_an_operator_without_a_key_is_named_by_its_option():
    with pytest.raises(
        CoserveError,
        match="--operator: tenant 'ben' has no key; coserve keys new makes one",
    ):
        Keys(ServerConfig(api_keys=("ann=one",), operators=("ben",)))


def test_no_key_is_held(tmp_path: Path):
    config = ServerConfig(
        api_keys=("ann=hunter-two", "bare-secret"),
        api_keys_file=str(keys_file(tmp_path, "", b="b")),
    )
    keys = Keys(config)
    assert not any(secret in repr((config, keys.ring)) for secret in ("hunter-two", "bare-secret"))


def test_without_keys_everything_is_open():
    ring = Keys(ServerConfig()).ring
    assert (
        ring.is_open and ring.is_operator("default") and ring.limits_of("default") == TenantLimits()
    )
    assert not KeyRing(tenants={digest_of("x"): "ann"}).is_operator("ann")


def test_new_keys_differ_and_cannot_be_guessed():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and min(map(len, keys)) >= 43


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[keys]\n", "has no keys"),
        ("", "has no keys"),
        ('[keys]\n"my-secret" = "ann"', "line 1 of [keys] does not begin with a digest"),
        (f'[keys]\n"{digest_of("x")}" = "a b"', "not a valid name of a tenant"),
        (
            f'[keys]\n"{digest_of("x")}" = "ann"\n[tenant.ann]\n',
            "'tenant' is not one of keys, tenants",
        ),
        (
            f'[keys]\n"{digest_of("x")}" = "ann"\n[tenants.ben]\nmax_jobs = 1',
            "keys.toml: tenant 'ben' has no key",
        ),
        (
            f'[keys]\n"{digest_of("x")}" = "ann"\n[tenants.ann]\nmax_job = 1',
            "'max_job', which is not one of",
        ),
        (
            f'[keys]\n"{digest_of("x")}" = "ann"\n[tenants.ann]\nmax_jobs = 0',
            "max_jobs must be a whole number",
        ),
        (
            f'[keys]\n"{digest_of("x")}" = "ann"\n[tenants.ann]\nmax_file_bytes = "much"',
            "is not a number",
        ),
        (
            f'[keys]\n"{digest_of("x")}" = "ann"\n[tenants.ann]\noperator = 1',
            "operator must be true or false",
        ),
        (f'[keys]\n"{digest_of("one")}" = "ben"', "already belongs to tenant 'ann'"),
        ("[keys", "is wrong"),
    ],
)
def test_a_wrong_file_is_refused_and_when_it_is_read_again_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, words: str
):
    path = keys_file(tmp_path, "", ann="good")
    config = ServerConfig(api_keys=("ann=one",), api_keys_file=str(path))
    keys = Keys(config)
    path.write_text(text)
    with pytest.raises(CoserveError, match=re.escape(words)):
        Keys(config)
    keys.reload()
    assert keys.ring.tenant_of("good") == "ann"
    assert words in caplog.text and "remain as they were" in caplog.text
    assert "my-secret" not in caplog.text
    keys_file(tmp_path, "", ben="better")
    keys.reload()
    assert keys.ring.tenant_of("good") is None and keys.ring.tenant_of("better") == "ben"


def test_a_file_that_others_can_write_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = keys_file(tmp_path, "", ann="good")
    path.chmod(0o666)
    with pytest.raises(CoserveError, match="other users can write"):
        Keys(ServerConfig(api_keys_file=str(path)))
    with pytest.raises(CoserveError, match="cannot be read"):
        Keys(ServerConfig(api_keys_file=str(tmp_path / "none.toml")))
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        Keys(ServerConfig(api_keys_file=str(path)))
    assert "no tenant is an operator" in caplog.text


def coserve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "coserve", *arguments]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_makes_a_key_and_its_line(tmp_path: Path):
    done = coserve("keys", "new", "ann")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    shown, line = done.stdout.splitlines()
    key, line = shown.rpartition(" ")[2], line.partition(": ")[2]
    (tmp_path / "keys.toml").write_text(f"[keys]\n{line}\n")
    assert (
        Keys(ServerConfig(api_keys_file=str(tmp_path / "keys.toml"))).ring.tenant_of(key) == "ann"
    )
    wrong = coserve("keys", "new", "a b")
    assert (
        wrong.returncode == 2
        and wrong.stderr.count("\n") == 1
        and "1 to 64 letters" in wrong.stderr
    )


def status(served: Served, key: str, path: str = "/v1/models") -> int:
    return served.get(path, headers={"Authorization": f"Bearer {key}"}).status_code


def test_a_server_with_a_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Roles, reading it again beside an open stream, and who may read what the server writes."""
    path = keys_file(
        tmp_path, "[tenants.ops]\noperator = true", ann="key-1", ben="key-2", ops="key-3"
    )
    monkeypatch.setenv("COSERVE_API_KEYS", "dan=key-4")
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    with serving("--api-keys-file", str(path), home=home) as served:
        assert [status(served, f"key-{number}") for number in range(1, 6)] == [
            200,
            200,
            200,
            200,
            401,
        ]
        assert "ps shows" not in served.log.read_text()
        for name in ("ann", "ben"):
            key = {"ann": "key-1", "ben": "key-2"}[name]
            served.client(key).completions.create(model="small", prompt="Hello", max_tokens=2)
            served.client(key).files.create(
                file=("x.jsonl", b'{"text": "x"}\n'), purpose="fine-tune"
            )
        _check_roles(served)
        _check_modes(served)
        _check_reload(served, path)


def _text(served: Served, key: str, path: str) -> httpx.Response:
    return served.get(path, headers={"Authorization": f"Bearer {key}"})


def _check_roles(served: Served) -> None:
    def tenants(key: str) -> set[str]:
        return set(re.findall(r'tenant="(\w+)"', _text(served, key, "/metrics").text))

    served.wait_until(lambda: {"ann", "ben"} <= tenants("key-3"))
    assert tenants("key-1") == {"ann"} and tenants("key-2") == {"ben"} and tenants("key-4") == set()
    assert "coserve_step_seconds" in _text(served, "key-3", "/metrics").text
    assert "coserve_job" not in _text(served, "key-1", "/metrics").text

    def finished(key: str) -> tuple[int, int]:
        status: Any = _text(served, key, "/v1/status").json()
        return status["requests"]["finished"], len(
            _text(served, key, "/v1/status/steps").json()["requests"]
        )

    served.wait_until(lambda: finished("key-3") == (2, 2))
    assert finished("key-1") == finished("key-2") == (1, 1)
    assert finished("key-4") == (0, 0)
    # The role is about how the server fares, and opens no one's files.
    assert len(served.client("key-1").files.list().data) == 1
    assert served.client("key-3").files.list().data == []


def _check_modes(served: Served) -> None:
    assert stat.S_IMODE(served.home.stat().st_mode) == 0o700
    made = [path for path in served.home.rglob("*") if not path.is_symlink()]
    assert any(path.name == "coserve.db" for path in made) and any(
        path.parent.name == "files" for path in made
    )
    for path in made:
        if path.is_file() or path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def _check_reload(served: Served, path: Path) -> None:
    body = {"model": "small", "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    headers = {"Authorization": "Bearer key-1"}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        next(lines)
        path.write_text("[keys]\nbroken")
        served.process.send_signal(signal.SIGHUP)
        served.wait_until(lambda: "the keys remain as they were" in served.log.read_text())
        assert status(served, "key-1") == 200
        keys_file(path.parent, "", ben="key-2", ann="key-5")
        served.process.send_signal(signal.SIGHUP)
        served.wait_until(lambda: status(served, "key-5") == 200)
        assert [status(served, f"key-{number}") for number in (1, 2, 3, 4)] == [401, 200, 401, 200]
        assert [line for line in lines if line][-1] == "data: [DONE]", (
            "its key was right when it began"
        )
    assert _text(served, "key-2", "/metrics").status_code == 200


def test_the_command_line_warns_that_others_see_it():
    with serving("--api-key", "ann=secret-1", "--operator", "ann") as served:
        log = served.log.read_text()
        assert "ps shows the key of --api-key" in log and "secret-1" not in log
        assert "coserve_step_seconds" in _text(served, "secret-1", "/metrics").text
