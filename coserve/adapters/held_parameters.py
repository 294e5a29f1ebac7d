"""How much of an adapter a rank holds, known before there is any of it."""

from math import prod

from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.full_weights import weight_places
from coserve.adapters.layout import AdapterLayout
from coserve.graph.layouts import AnyState
from coserve.kernels.cuts import Cut
from coserve.models.backbone import Backbone


def num_held_parameters(backbone: Backbone, layout: AdapterLayout) -> int:
    """Return how many of an adapter's parameters a rank holds at most: pieces of those that ranks
    divide, and all of the others.

    Raises:
        AdapterError: the adapter cannot be divided among the ranks.
    """
    if backbone.ranks.size == 1:
        return layout.num_parameters
    states = _states(backbone, layout)
    return sum(
        prod(state.local_shape(shape) if isinstance(state := states.get(name), Cut) else shape)
        for name, shape in layout.shapes.items()
    )


def _states(backbone: Backbone, layout: AdapterLayout) -> dict[str, AnyState]:
    """Return how ranks divide the parameters, by full name; of weights that an adapter brings this
    is not known.
    """
    places, local = weight_places(backbone.architecture), backbone.local
    states = {name: local.state(*places[name]) for name in layout.shapes if name in places}
    if layout.method is not None and layout.frozen is None:
        states |= AdapterGraphs.on(layout.method, layout, backbone).states
    return states
