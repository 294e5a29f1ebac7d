"""The size of a rank's part of an adapter, known before any of it exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.frozen_weights import FROZEN
from coserve.adapters.full_weights import weight_places
from coserve.adapters.layout import AdapterLayout
from coserve.graph.layouts import AnyState
from coserve.kernels.cuts import Cut
from coserve.models.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class HeldElements:
    """Elements of an adapter that a rank holds at most: pieces of what ranks divide, and all of
    what they do not.
    """

    parameters: int
    """Elements that are trained."""
    frozen: int
    """Elements of weights that the adapter brings and does not train."""


def whole_adapter(layout: AdapterLayout) -> HeldElements:
    """Return the elements of an adapter that one process holds all of."""
    return HeldElements(parameters=layout.num_parameters, frozen=layout.num_frozen)


def held_elements(backbone: Backbone, layout: AdapterLayout) -> HeldElements:
    """Return how many elements of an adapter this rank holds at most.

    Raises:
        AdapterError: the adapter cannot be divided among the ranks.
    """
    if backbone.ranks.size == 1:
        return whole_adapter(layout)
    places, local = weight_places(backbone.architecture), backbone.local
    states = {name: local.state(*places[name]) for name in layout.shapes if name in places}
    if layout.method is not None:
        states |= AdapterGraphs.on(layout.method, layout, backbone).states
    frozen: dict[str, tuple[int, ...]] = {}
    if layout.frozen is not None:
        for module, shape in layout.frozen.shapes(layout.architecture).items():
            frozen[f"{module}.{FROZEN}"] = shape
    return HeldElements(
        parameters=_num_elements(layout.shapes, states), frozen=_num_elements(frozen, states)
    )


def _num_elements(shapes: Mapping[str, tuple[int, ...]], states: Mapping[str, AnyState]) -> int:
    """Return the elements that a rank holds of tensors of these whole shapes."""
    total = 0
    for name, shape in shapes.items():
        state = states.get(name)
        total += prod(state.local_shape(shape) if isinstance(state, Cut) else shape)
    return total
