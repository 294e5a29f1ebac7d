"""The server's settings, and the options that are made of them."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from coserve.cli.commands.up import up
from coserve.cli.main import main
from coserve.scheduling.policies import make_policy, policy_names
from coserve.server.config import ServerConfig, bytes_of, objective_of, seconds_of


def test_options_are_the_fields_of_the_configuration():
    parameters = inspect.signature(up).parameters
    marks = [parameter.annotation.__metadata__[0] for parameter in parameters.values()]
    assert [(mark.default, *(mark.param_decls or ()))[-1] for mark in marks] == [
        ...,  # the model
        *("--host", "--port", "--dtype", "--weights", "--device", "--memory", "--slo-ttft", "--slo-tpot", "--policy"),
        *("--policy-setting", "--threads"),
        *("--max-requests", "--max-adapters", "--api-key", "--allow-adapter-paths", "--home", "--database"),
        *("--max-upload", "--max-body", "--record", "--drain"),
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


def test_an_objective_has_a_unit():
    assert [objective_of(text) for text in ("40ms", "2s", ".5 S")] == pytest.approx([0.04, 2, 0.5])
    for text, words in (
        ("50", "'50' has no unit; give 50ms (which is 0.05s), or 50s"),
        ("0.5", "0.5ms"),
        ("x", "is no"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            objective_of(text)


@pytest.mark.parametrize("option", ["--slo-ttft", "--slo-tpot"])
@pytest.mark.parametrize("name", ["up", "demo"])
def test_a_bare_number_is_no_objective(monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, option: str):
    monkeypatch.setattr("sys.argv", ["coserve", name, option, "50"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == "" and err.count("\n") == 1
    assert option in err and "give 50ms (which is 0.05s), or 50s" in err


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


def test_the_policy_and_its_settings_come_from_the_command_line():
    config = ServerConfig(policy="vtc", policy_settings=("w_q=3", "arrival_share=0.05"))
    policy: Any = make_policy(config.engine.policy, config.engine.policy_settings)
    assert (policy.token_weights.output, policy.arrival_share) == (3.0, 0.05)
    for settings, words in (
        (("w_q",), "KEY=VALUE, not 'w_q'"),
        (("w_x=1",), "no setting 'w_x'; its settings are max_gap_tpots"),
        (("w_q=-1",), "w_q must be a number of at least 0, not -1"),
        (("w_q=much",), "w_q must be a number of at least 0, not 'much'"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            ServerConfig(policy="vtc", policy_settings=settings)


def test_help_lists_the_policies_that_there_are():
    parameter = inspect.signature(up).parameters["policy"]
    assert all(name in parameter.annotation.__metadata__[0].help for name in policy_names())


def test_where_state_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path))
    assert ServerConfig().directory == tmp_path
    assert ServerConfig(home="/elsewhere").directory == Path("/elsewhere")
    monkeypatch.delenv("COSERVE_HOME")
    assert ServerConfig().directory == Path.home() / ".coserve"
