"""Policies: pure functions from a view to a plan, one file each, found by name."""

from collections.abc import Callable
from importlib import import_module

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View

Policy = Callable[[View, LatencyModel], Plan]

# Each is the function `plan` of the module of its name.
POLICIES = ("slack", "token-fusion", "inference-only", "tuning-only")


def make_policy(name: str) -> Policy:
    """The policy of a name; ValueError lists those that there are."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    policy: Policy = import_module(f"{__name__}.{name.replace('-', '_')}").plan
    return policy
