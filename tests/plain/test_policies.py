"""Policies are found by file name, with settings of their own; virtual token counters keep tenants'
shares fair."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import coserve.scheduling.policies as registry
from coserve.engine.config import EngineConfig
from coserve.scheduling.fairness import TokenCounters, TokenWeights
from coserve.scheduling.policies import make_policy, policy_class, policy_names

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"
FOLDER = Path(registry.__file__).parent


def test_every_file_of_the_folder_is_a_policy():
    files = {path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py")} - {"base"}
    assert set(policy_names()) == files and policy_names()[0] == "slack"
    for name in policy_names():
        policy = make_policy(name)
        assert type(policy) is policy_class(name) and policy.summary
        assert [one.name for one in policy.settings()] == [one.name for one in fields(policy)]
        assert all(one.help.endswith(".") for one in policy.settings())


def test_a_file_more_is_a_policy_more(tmp_path, monkeypatch):
    """Nothing else has to be told of it."""
    (tmp_path / "first_come.py").write_text(
        "from dataclasses import dataclass\n"
        "from coserve.scheduling.plan import Plan\n"
        "from coserve.scheduling.policies.base import Policy, setting\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class FirstCome(Policy):\n"
        "    summary = 'nothing at all'\n"
        "    most: int = setting(3, 'How many.', least=1)\n"
        "    eager: bool = setting(False, 'Whether at once.')\n"
        "    def plan(self, view, latency):\n"
        "        return Plan()\n"
    )
    (tmp_path / "_sums.py").write_text("")  # what policies share
    monkeypatch.setattr(registry, "__path__", [*registry.__path__, str(tmp_path)])
    policy_names.cache_clear()
    try:
        assert "first-come" in policy_names() and not any("sums" in name for name in policy_names())
        policy: Any = make_policy("first-come", {"most": "5", "eager": "yes"})
        assert (policy.most, policy.eager) == (5, True)
        for settings, words in (
            ({"most": "0"}, "most must be a whole number of at least 1, not 0"),
            ({"most": 1.5}, "most must be a whole number"),
            ({"eager": "perhaps"}, "eager must be true or false, not 'perhaps'"),
            ({"eager": 1}, "eager must be true or false, not 1"),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                make_policy("first-come", settings)
    finally:
        monkeypatch.undo()
        policy_names.cache_clear()
        policy_class.cache_clear()


def test_what_there_is_is_said_where_something_else_is_asked_for():
    for name, settings, words in (
        ("fifo", {}, f"policy 'fifo' is not one of {', '.join(policy_names())}"),
        (
            "slack",
            {"speed": 1},
            "policy 'slack' has no setting 'speed'; its settings are max_gap_tpots, reserve_tpots",
        ),
        ("token-fusion", {"speed": 1}, "policy 'token-fusion' has no setting 'speed'; it has none"),
        (
            "slack",
            {"arrival_share": 2},
            "setting arrival_share must be a number from 0 to 1, not 2",
        ),
        (
            "slack",
            {"max_gap_tpots": "nan"},
            "setting max_gap_tpots must be a number of at least 1, not nan",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            EngineConfig(policy=name, policy_settings=settings)


def test_the_documentation_lists_policies_and_settings_as_they_are():
    text = DOCS.read_text()
    for name in policy_names():
        assert f"| `{name}` | {policy_class(name).summary} |" in text
        for one in policy_class(name).settings():
            shown = json.dumps(one.default) if isinstance(one.default, bool) else f"{one.default:g}"
            assert f"| `{one.name}` | {shown} | {one.help} |" in text, "as it is to be given"


# -- virtual token counters ---------------------------------------------------------------


def served(counters: TokenCounters) -> dict[str, float]:
    return {view.name: view.served for view in counters.views()}


def test_counters_add_up_what_tenants_were_served():
    counters = TokenCounters(TokenWeights(prompt=1.0, output=2.0, tuning=0.5))
    counters.arrive("a", 1)
    counters.charge("a", prompt=10, output=3, tuning=4)
    assert (
        served(counters) == {"a": 18.0}
        and counters.served("a") == 18.0
        and counters.served("b") == 0.0
    )


def test_who_returns_is_lifted_to_the_least_of_those_that_queue():
    """Algorithm 4, line 11: idling saves up no credit."""
    counters = TokenCounters()
    for tenant in ("a", "b", "c"):
        counters.arrive(tenant, 1)
    counters.leave("c", 1)
    counters.charge("a", prompt=100)
    counters.charge("b", prompt=70)
    counters.arrive("c", 1)
    assert served(counters) == {"a": 100.0, "b": 70.0, "c": 70.0}
    counters.arrive("c", 2)  # not alone: nothing changes
    counters.charge("b", prompt=500)
    counters.leave("c", 2)
    counters.arrive("c", 2)
    assert served(counters)["c"] == 70.0


def test_who_finds_an_empty_queue_is_lifted_to_the_last_that_left_it():
    """Algorithm 4, lines 7 to 9."""
    counters = TokenCounters()
    counters.arrive("a", 1)
    counters.charge("a", prompt=100)
    counters.leave("a", 1)
    counters.arrive("b", 1)
    assert served(counters) == {"b": 100.0}
    counters.leave("b", 1)
    counters.arrive("a", 1)
    assert served(counters) == {"a": 100.0}, "and nobody is lowered"


def test_work_that_leaves_or_arrives_again_counts_once():
    """A caller that was interrupted calls again."""
    counters = TokenCounters()
    for item in (1, 1, 2):
        counters.arrive("a", item)
    counters.leave("a", 1)
    counters.leave("a", 1)
    assert served(counters) == {"a": 0.0}
    counters.leave("a", 2)
    counters.leave("a", 2)
    assert served(counters) == {}
