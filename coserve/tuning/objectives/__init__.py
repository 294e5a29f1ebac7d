"""Training objectives, one file each, found by the file's name (`dpo`, `orpo`, …).

`supervised` is the next-token loss; all others turn the log-probabilities of a pack's rows into a
gradient.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coserve.discovery import variant_class, variant_names
from coserve.errors import AdapterError

if TYPE_CHECKING:
    from coserve.adapters.base import AdapterConfig
    from coserve.tuning.objectives.base import Objective

SUPERVISED = "supervised"


def objective_names() -> tuple[str, ...]:
    """Return the names of all objectives, the next-token loss first."""
    return SUPERVISED, *variant_names(__path__)


def method_names() -> tuple[str, ...]:
    """Return the names of all objectives as clients write them, in a job's `method` and on the
    command line.
    """
    return tuple(name.replace("-", "_") for name in objective_names())


def objective_class(name: str) -> "type[Objective] | None":
    """Return the class of an objective; None for the next-token loss.

    Raises:
        ValueError: There is no such objective; the message lists all.
    """
    if name == SUPERVISED:
        return None
    if name not in objective_names():
        raise ValueError(f"objective {name!r} is not one of {', '.join(objective_names())}")
    return _class(name)


@lru_cache
def _class(name: str) -> "type[Objective]":
    from coserve.tuning.objectives.base import Objective

    objective: type[Objective] = variant_class(__name__, name, Objective)
    return objective


def make_objective(name: str, settings: Mapping[str, Any]) -> "Objective | None":
    """Return an objective with these settings; None for the next-token loss.

    Raises:
        ValueError: There is no such objective or setting, or a value is out of its range.
    """
    kind = objective_class(name)
    known = [] if kind is None else [each.name for each in fields(kind)]
    if unknown := [each for each in settings if each not in known]:
        raise ValueError(
            f"{name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
    return None if kind is None else kind(**settings)


def check_trains(name: str, config: "AdapterConfig", *, trains_head: bool) -> None:
    """Check that an objective can train an adapter.

    Args:
        trains_head: Whether the adapter has parameters at the output layer.

    Raises:
        AdapterError: An objective over sequences cannot train it.
    """
    kind = objective_class(name)
    if kind is None:
        return
    if config.is_model and kind.needs_reference:
        raise AdapterError(
            f"{name} compares with the model as it was, and full fine-tuning changes it: use an "
            f"adapter"
        )
    if config.num_virtual_tokens:
        raise AdapterError(
            f"{name} trains no virtual tokens; an adapter with these has the method supervised"
        )
    if not trains_head:
        return
    if config.is_model:
        raise AdapterError(
            f"{name} does not train the output layer, nor a table of embeddings that is one: "
            f"choose blocks by "
            "layers_to_transform, or modules by target_modules"
        )
    raise AdapterError(
        f"{name} does not train an adapter at the output layer; leave lm_head out of target_modules"
    )
