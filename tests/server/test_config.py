"""The server's settings, and the options that are made of them."""

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from coserve.cli.commands.up import up
from coserve.cli.main import main
from coserve.scheduling.policies import make_policy, policy_names
from coserve.server import routes
from coserve.server.app import create_app
from coserve.server.config import ServerConfig
from coserve.server.options import option_of
from coserve.server.tenancy.admission import Admission
from coserve.server.tenancy.keys import digest_of
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.ledger import RequestLedger
from coserve.server.units import bytes_of, seconds_of, slo_seconds


def test_options_are_the_fields_of_the_configuration_in_groups():
    model, *marks = [
        each.annotation.__metadata__[0] for each in inspect.signature(up).parameters.values()
    ]
    groups: dict[str, list[Any]] = {}
    for mark in marks:
        groups.setdefault(mark.rich_help_panel, []).append(
            (mark.default, *(mark.param_decls or ()))[-1]
        )
    assert {title: " ".join(names) for title, names in groups.items()} == {
        "Model": "--served-model-name --max-model-len --dtype --weights --device --threads --tensor-parallel "
        "--deterministic --tool-call-parser --chat-template --lora-modules --generation-config",
        "Memory and scheduling": "--memory --host-memory --slo-ttft --slo-tpot --policy --policy-setting "
        "--max-requests --max-queued-requests --max-adapters --max-running-jobs --job-timeout --trainable-model "
        "--weight-window --role --prefill-socket --prefill-min-tokens",
        "Tenants": "--api-key --api-keys-file --operator --tenant-max-requests --tenant-tokens-per-minute "
        "--tenant-max-jobs --tenant-max-running-jobs --tenant-max-files --tenant-max-batches "
        "--tenant-weight --share-prefixes --public-prefix --allow-adapter-paths",
        "HTTP": "--host --port --ssl-certfile --ssl-keyfile --allowed-hosts --cors-origin --root-path "
        "--max-connections --max-body --max-upload --timeout-headers --timeout-body --timeout-keep-alive "
        "--unknown-fields --request-timeout",
        "Operation": "--home --database --files-url --result-encoding --response-storage --measure-first --log-format "
        "--log-level --otlp-endpoint --record --engine-timeout --drain",
    }
    assert model.default is ... and 1 + len(marks) == len(fields(ServerConfig))
    assert all(mark.help for mark in marks)


@pytest.mark.parametrize(
    ("text", "number"),
    [("512MB", 512e6), ("4GiB", 2**32), ("4 gb", 4e9), ("1000", 1000), ("1.5k", 1500), ("7B", 7)],
)
def test_sizes(text: str, number: float):
    assert bytes_of(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("40ms", 0.04), ("2s", 2), ("0.5", 0.5), ("1min", 60), ("2h", 7200), (".5 s", 0.5)],
)
def test_durations(text: str, number: float):
    assert seconds_of(text) == pytest.approx(number)


def test_an_slo_has_a_unit():
    assert [slo_seconds(text) for text in ("40ms", "2s", ".5 S")] == pytest.approx([0.04, 2, 0.5])
    for text, words in (
        ("50", "'50' has no unit: use 50ms (which is 0.05s), or 50s"),
        ("0.5", "0.5ms"),
        ("x", "is no"),
        ("0s", "'0s' must be above 0"),
        ("0.0 ms", "'0.0 ms' must be above 0"),
        ("9" * 400 + "s", "must be above 0 and finite"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            slo_seconds(text)


@pytest.mark.parametrize("option", ["--slo-ttft", "--slo-tpot"])
@pytest.mark.parametrize("name", ["up", "demo"])
def test_a_bare_number_is_no_slo(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, option: str
):
    monkeypatch.setattr("sys.argv", ["coserve", name, option, "50"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == "" and err.count("\n") == 1
    assert option in err and "use 50ms (which is 0.05s), or 50s" in err


@pytest.mark.parametrize("text", ["", "x", "-1s", "1 parsec", "1e3s", "s"])
def test_what_is_neither(text: str):
    for read in (bytes_of, seconds_of):
        with pytest.raises(ValueError, match=r"is no|is negative"):
            read(text)


def test_values_that_help_texts_give_as_examples_are_understood():
    options = [option_of(one) for one in fields(ServerConfig)]
    examples = [
        (option, text)
        for option in options
        if option.parse is not None
        for text in re.findall(r"\d[\d.]*[a-zA-Z]+", f"{option.help} {option.shown}")
    ]
    assert ("--job-timeout", "2h") in [(option.option, text) for option, text in examples]
    assert all(option.parse(text) > 0 for option, text in examples)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--request-timeout", "0"), "--request-timeout must be a number of seconds above 0"),
        (("--port", "70000"), "--port must be a whole number from 0 to 65535"),
        (("--ssl-keyfile", "key.pem"), "--ssl-keyfile needs --ssl-certfile"),
        (("--policy-setting", "x"), "--policy-setting must be KEY=VALUE"),
        (
            ("--tensor-parallel", "0"),
            "--tensor-parallel must be a whole number of at least 1, not 0",
        ),
        (
            ("--tensor-parallel", "2", "--trainable-model", "big=tiny"),
            "--trainable-model must be empty where --tensor-parallel is above 1",
        ),
    ],
)
def test_what_is_wrong_is_said_by_the_names_of_options(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: tuple[str, ...], words: str
):
    monkeypatch.setattr("sys.argv", ["coserve", "up", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert words in capsys.readouterr().err


def test_keys_name_tenants_and_do_not_tell_themselves():
    config = ServerConfig(api_keys=("ann=one", "two", "abc==", "x=y=z"))
    assert config.tenants[digest_of("one")] == "ann"
    assert config.tenants[digest_of("y=z")] == "x"
    assert set(config.tenants) == set(map(digest_of, ("one", "two", "abc==", "y=z")))
    for key in ("two", "abc=="):
        assert config.tenants[digest_of(key)].startswith("key-")
        assert key not in config.tenants[digest_of(key)]
    assert not any(key in repr(config.api_keys) for key in ("one", "two", "abc==")), (
        "only their digests are kept"
    )
    assert ServerConfig(api_keys=config.api_keys).tenants == config.tenants
    with pytest.raises(ValueError, match="differ"):
        ServerConfig(api_keys=("a=one", "b=one"))
    with pytest.raises(ValueError, match="empty"):
        ServerConfig(api_keys=("",))


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"port": 70000},
            {"port": True},
            {"drain_s": -1.0},
            {"max_body_bytes": 0},
            {"policy": "greed"},
            {"ttft_s": 0},
        ),
        *(
            {"max_connections": 0},
            {"timeout_headers_s": 0.0},
            {"request_timeout_s": -1.0},
            {"max_queued_requests": 0},
        ),
        *(
            {"ssl_keyfile": "key.pem"},
            {"allowed_hosts": ("http://x",)},
            {"log_format": "xml"},
            {"log_level": "loud"},
        ),
    ],
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


def test_a_file_more_is_a_group_of_routes_more(monkeypatch, tmp_path):
    """Nothing else has to be told of it."""
    greeting = (
        "from fastapi import APIRouter\n\nrouter = APIRouter()\n\n\n@router.get('/v1/greeting')\n"
    )
    (tmp_path / "greeting.py").write_text(greeting + "def greeting() -> str:\n    return 'hello'\n")
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(routes, "__path__", [*routes.__path__, str(tmp_path)])
    config = ServerConfig()
    keys = Keys(config)
    context: Any = SimpleNamespace(
        config=config, keys=keys, admission=Admission(keys, RequestLedger()), tracing=None
    )
    client = TestClient(create_app(context), base_url="http://localhost")
    monkeypatch.delitem(sys.modules, "coserve.server.routes.greeting")
    assert client.get("/v1/greeting").json() == "hello"
