"""Policies: pure functions from a view to a plan, one file each, found by the file's name."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from coserve.scheduling.policies.base import Policy, Setting

__all__ = ["DEFAULT_POLICY", "Policy", "Setting", "make_policy", "policy_class", "policy_names"]

DEFAULT_POLICY = "slack"


@cache
def policy_names() -> tuple[str, ...]:
    """All that there are: the files of this folder; the default first."""
    found = {module.name.replace("_", "-") for module in iter_modules(__path__)} - {"base"}
    return (DEFAULT_POLICY, *sorted(found - {DEFAULT_POLICY}))


@cache
def policy_class(name: str) -> type[Policy]:
    """The policy in the file of this name; ValueError lists those that there are."""
    if name not in policy_names():
        raise ValueError(f"policy {name!r} is not one of {', '.join(policy_names())}")
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Policy) and each.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define one policy, not {len(found)}"
    return found[0]


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """The policy of a name, with settings by name; ValueError says what there is."""
    return policy_class(name).from_settings(name, settings or {})
