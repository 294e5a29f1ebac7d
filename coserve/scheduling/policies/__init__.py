"""Policies: pure functions from a view to a plan, one file each, found by the file's name."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from coserve.discovery import variant_class, variant_names
from coserve.scheduling.policies.base import Policy, Setting

__all__ = ["DEFAULT_POLICY", "Policy", "Setting", "make_policy", "policy_class", "policy_names"]

DEFAULT_POLICY = "slack"


@cache
def policy_names() -> tuple[str, ...]:
    """Return the names of all policies: the files of this folder, the default first."""
    names = variant_names(__path__)
    return (DEFAULT_POLICY, *(name for name in names if name != DEFAULT_POLICY))


@cache
def policy_class(name: str) -> type[Policy]:
    """Return the policy in the file of this name.

    Raises:
        ValueError: There is no such policy; the message lists all.
    """
    if name not in policy_names():
        raise ValueError(f"policy {name!r} is not one of {', '.join(policy_names())}")
    policy: type[Policy] = variant_class(__name__, name, Policy)
    return policy


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy of this name with these settings.

    Raises:
        ValueError: There is no such policy, or no such setting.
    """
    return policy_class(name).from_settings(name, settings or {})
