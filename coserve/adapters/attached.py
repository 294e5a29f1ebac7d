"""The graphs of an adapter: those of its model's parts with the bypasses of its method, as this
rank runs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from torch import Tensor

from coserve.adapters.layout import AdapterLayout, HasBypasses
from coserve.errors import AdapterError, GraphError
from coserve.graph.bypass import AttachedGraph, Bypass, attach
from coserve.graph.layouts import FIRST, WHOLE, AnyState
from coserve.graph.parallel.bypasses import AttachedLocalGraph, attach_local
from coserve.kernels.cuts import Cut
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.local import LocalModel
from coserve.models.shares import piece


@dataclass(frozen=True, kw_only=True)
class AdapterGraphs:
    """The attached graphs of an adapter; equal parts share one object."""

    by_training: Mapping[bool, Mapping[Part, AttachedGraph]]
    """The graph of each part: what training differentiates (True), and what requests run
    (False)."""
    states: Mapping[str, AnyState] = field(default_factory=dict)
    """Cuts of the parameters and derived tensors that this rank holds in part, by full name; all
    others are whole."""
    summed: tuple[str, ...] = ()
    """Full names, in alphabetical order, of the parameters of whose gradient each rank has a part,
    which ranks add up once a step."""
    divided: Mapping[Part, AttachedLocalGraph] = field(default_factory=dict)
    """The graph of each part as training differentiates it, with states, where ranks divide the
    model."""

    counted_once: tuple[str, ...] = ()
    """Full names, at the module that reads it, of a parameter of whose gradient each rank has a
    part from another module that reads it, and all of it from this one. Rank 0 alone counts these.
    """

    @property
    def dropped(self) -> list[str]:
        """Return the full names, at the module that reads them, of the parameters whose gradients
        from there ranks other than 0 drop: because rank 0 alone holds them, and others have zeros
        that are not trained, or counts them.
        """
        return [
            *(name for name, state in self.states.items() if state is FIRST),
            *self.counted_once,
        ]

    def own(self, name: str, value: Tensor, whole: tuple[int, ...], rank: int) -> Tensor:
        """Return what a rank holds of a parameter.

        Args:
            name: its full name.
            value: the whole tensor, or what the rank holds of it already.
            whole: shape of the whole tensor.
            rank: number of the rank.
        """
        return (
            piece(value, self.states.get(name, WHOLE), rank)
            if tuple(value.shape) == whole
            else value
        )

    def own_derived(self, name: str, value: Tensor, whole: tuple[int, ...], rank: int) -> Tensor:
        """Do the same for a derived tensor, of which a whole one is that of many modules, and of
        every step: then so is the piece.
        """
        state = self.states.get(name, WHOLE)
        return (
            _kept_piece(value, state, rank)
            if isinstance(state, Cut) and tuple(value.shape) == whole
            else value
        )

    @classmethod
    def on(cls, config: HasBypasses, layout: AdapterLayout, backbone: Backbone) -> Self:
        """Return the graphs of an adapter on a backbone, whose vocabulary may be another than the
        adapter's.

        Raises:
            AdapterError: several ranks hold the model, and the adapter cannot be divided among
                them.
        """
        return cls.of(config, layout, backbone.local_of(layout.architecture))

    @classmethod
    def of(cls, config: HasBypasses, layout: AdapterLayout, local: LocalModel) -> Self:
        """Attach a method's bypasses to the graphs of its model.

        Args:
            config: the method.
            layout: the adapter's, on the whole model.
            local: what of that model runs here.

        Raises:
            AdapterError: several ranks hold the model, and the method cannot be divided among them.
        """
        bypasses = {
            training: _bypasses(config, layout, training=training) for training in (True, False)
        }
        if not local.divided:
            # Equal blocks get the same object, so that programs and captured calls are made once
            # for all.
            shared: dict[tuple[Any, ...], AttachedGraph] = {}
            return cls(
                by_training={
                    training: _attached(local, of, shared) for training, of in bypasses.items()
                }
            )
        return cls._divided(layout, local, bypasses)

    @classmethod
    def _divided(
        cls,
        layout: AdapterLayout,
        local: LocalModel,
        bypasses: Mapping[bool, Mapping[Part, Mapping[str, Bypass]]],
    ) -> Self:
        shared: dict[tuple[Any, ...], AttachedLocalGraph] = {}
        found: dict[bool, dict[Part, AttachedLocalGraph]] = {}
        ranks = local.ranks
        for training, by_part in bypasses.items():
            found[training] = {}
            for part, of_part in by_part.items():
                divided = local.divided[part]
                # Requests run with the parameters that training has.
                # Training comes first in `bypasses`, and its graph decides how parameters are cut.
                fixed = {} if training else dict(_own_states(found[True][part]))
                key = (divided.graph, _key(of_part), tuple(fixed.items()))
                if key not in shared:
                    try:
                        shared[key] = attach_local(divided, of_part, ranks, fixed=fixed)
                    except GraphError as error:
                        raise AdapterError(
                            f"the adapter cannot be divided among {ranks.size} ranks: {error}"
                        ) from None
                found[training][part] = shared[key]
        prefix = layout.architecture.prefix
        states = {
            prefix(part) + name: state
            for part, attached in found[True].items()
            for name, state in _own_states(attached)
        }
        summed = {prefix(part) + name for part, each in found[True].items() for name in each.summed}
        counted_once = set[str]()
        for name, owner in layout.shared.items():
            # One tensor cannot be held in two ways.
            if states.get(name, WHOLE) != states.get(owner, WHOLE):
                raise AdapterError(
                    f"{name} is {owner}, and ranks would divide the two in different ways"
                )
            # Ranks add up the shared parameter's gradient; what is whole on each must count once.
            if summed & {name, owner}:
                counted_once |= {name, owner} - summed
                summed.add(owner)
        return cls(
            by_training={
                training: {part: each.attached for part, each in parts.items()}
                for training, parts in found.items()
            },
            states=states,
            summed=tuple(sorted(summed - layout.shared.keys())),
            counted_once=tuple(sorted(counted_once)),
            divided=found[True],
        )


@lru_cache(maxsize=64)
def _kept_piece(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    return cut.take(whole, rank)


def _own_states(each: AttachedLocalGraph) -> list[tuple[str, AnyState]]:
    """Return the states of an adapter's parameters and of what is derived from them."""
    graph = each.attached.graph
    own = (*graph.with_kind("parameter"), *graph.with_kind("derived"))
    return [(spec.name, each.states[spec.name]) for spec in own]


def _bypasses(
    config: HasBypasses, layout: AdapterLayout, *, training: bool
) -> dict[Part, dict[str, Bypass]]:
    """Return the bypasses by part and node."""
    found: dict[Part, dict[str, Bypass]] = {part: {} for part in layout.architecture.parts}
    for place in layout.places.values():
        found[place.part][place.node.name] = layout.bypass(config, place, training=training)
    return found


def _attached(
    local: LocalModel,
    bypasses: Mapping[Part, Mapping[str, Bypass]],
    shared: dict[tuple[Any, ...], AttachedGraph],
) -> dict[Part, AttachedGraph]:
    result = {}
    for part, of_part in bypasses.items():
        graph = local.graphs[part]
        key = (graph, _key(of_part))
        if key not in shared:
            shared[key] = attach(graph, of_part)
        result[part] = shared[key]
    return result


def _key(bypasses: Mapping[str, Bypass]) -> tuple[Any, ...]:
    return tuple((site, each.graph, tuple(each.own.items())) for site, each in bypasses.items())
