"""Objectives: what training makes likelier, one file each, found by the file's name (`dpo`, `orpo`, …).

`supervised` is the next-token loss; all others turn the log-probabilities of a pack's rows into a gradient.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coserve.discovery import variant_class, variant_names

if TYPE_CHECKING:
    from coserve.tuning.objectives.base import Objective

SUPERVISED = "supervised"


def objective_names() -> tuple[str, ...]:
    """All, the next-token loss first."""
    return SUPERVISED, *variant_names(__path__)


def objective_class(name: str) -> "type[Objective] | None":
    """Of an objective; None for the next-token loss. ValueError names those that there are."""
    if name == SUPERVISED:
        return None
    if name not in objective_names():
        raise ValueError(f"objective {name!r} is not one of {', '.join(objective_names())}")
    return _class(name)


@lru_cache
def _class(name: str) -> "type[Objective]":
    from coserve.tuning.objectives.base import Objective

    found: type[Objective] = variant_class(__name__, name, Objective)
    return found


def make_objective(name: str, settings: Mapping[str, Any]) -> "Objective | None":
    """An objective with settings of its own; None for the next-token loss. ValueError names what is wrong."""
    found = objective_class(name)
    known = [] if found is None else [each.name for each in fields(found)]
    if unknown := [each for each in settings if each not in known]:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return None if found is None else found(**settings)
