"""The server's settings, and the options that are made of them."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from coserve.cli.up import command
from coserve.server.config import ServerConfig, bytes_of, seconds_of


def test_options_are_the_fields_of_the_configuration():
    parameters = inspect.signature(command()).parameters
    marks = [parameter.annotation.__metadata__[0] for parameter in parameters.values()]
    assert [(mark.default, *(mark.param_decls or ()))[-1] for mark in marks] == [
        ...,  # the model
        *("--host", "--port", "--dtype", "--device", "--memory", "--slo-ttft", "--slo-tpot", "--policy"),
        "--threads",
        *("--max-requests", "--max-adapters", "--api-key", "--allow-adapter-paths", "--home", "--database"),
        *("--max-upload", "--max-body", "--drain"),
    ]
    assert all(mark.help for mark in marks)


@pytest.mark.parametrize(
    ("text", "number"), [("512MB", 512e6), ("4GiB", 2**32), ("4 gb", 4e9), ("1000", 1000), ("1.5k", 1500), ("7B", 7)]
)
def test_sizes(text: str, number: float):
    assert bytes_of(text) == number


@pytest.mark.parametrize(("text", "number"), [("40ms", 0.04), ("2s", 2), ("0.5", 0.5), ("1min", 60), (".5 s", 0.5)])
def test_durations(text: str, number: float):
    assert seconds_of(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "x", "-1s", "1 parsec", "1e3s", "s"])
def test_what_is_neither(text: str):
    for read in (bytes_of, seconds_of):
        with pytest.raises(ValueError, match="is no"):
            read(text)


def test_keys_name_tenants_and_do_not_tell_themselves():
    config = ServerConfig(api_keys=("ann=one", "two", "abc==", "x=y=z"))
    assert config.tenants["one"] == "ann"
    assert config.tenants["y=z"] == "x"
    assert set(config.tenants) == {"one", "two", "abc==", "y=z"}
    for key in ("two", "abc=="):
        assert config.tenants[key].startswith("key-")
        assert key not in config.tenants[key]
    with pytest.raises(ValueError, match="differ"):
        ServerConfig(api_keys=("a=one", "b=one"))
    with pytest.raises(ValueError, match="empty"):
        ServerConfig(api_keys=("",))


@pytest.mark.parametrize(
    "wrong",
    [{"port": 70000}, {"port": True}, {"drain_s": -1.0}, {"max_body_bytes": 0}, {"policy": "greed"}, {"ttft_s": 0}],
    ids=str,
)
def test_values_that_are_wrong_are_named(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerConfig(**wrong)


def test_where_state_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path))
    assert ServerConfig().directory == tmp_path
    assert ServerConfig(home="/elsewhere").directory == Path("/elsewhere")
    monkeypatch.delenv("COSERVE_HOME")
    assert ServerConfig().directory == Path.home() / ".coserve"
