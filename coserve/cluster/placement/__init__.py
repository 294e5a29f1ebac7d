"""Placements: pure functions from a view of the cluster and a task to a node, one file each, found
by its name.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from coserve.cluster.placement.base import PlacementPolicy
from coserve.discovery import variant_class, variant_names

__all__ = ["PlacementPolicy", "make_placement", "placement_class", "placement_names"]


@cache
def placement_names() -> tuple[str, ...]:
    """Return the names of all placements: the files of this folder."""
    return variant_names(__path__)


@cache
def placement_class(name: str) -> type[PlacementPolicy]:
    """Return the placement in the file of this name.

    Raises:
        ValueError: There is no such placement; the message lists those that there are.
    """
    if name not in placement_names():
        raise ValueError(f"placement {name!r} is not one of {', '.join(placement_names())}")
    policy: type[PlacementPolicy] = variant_class(__name__, name, PlacementPolicy)
    return policy


def make_placement(name: str, settings: Mapping[str, Any] | None = None) -> PlacementPolicy:
    """Return the placement of a name with these settings.

    Raises:
        ValueError: There is no such placement or setting, or a value is out of range.
    """
    return placement_class(name).from_settings(name, settings or {})
