"""Names, shapes and places of an adapter's tensors, known before any is allocated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, Self

from coserve.adapters.frozen_weights import FROZEN, FrozenWeights, with_frozen_weight
from coserve.adapters.places import Place
from coserve.graph.bypass import Bypass
from coserve.graph.tensors import TensorSpec
from coserve.models.base import Architecture, Part


class HasBypasses(Protocol):
    """The part of a method that concerns its bypasses; see `AdapterConfig`."""

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        """Return the places where it sits."""

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        """Return its bypass at a place."""

    def shared(self, architecture: Architecture) -> Mapping[str, str]:
        """Return the parameters that are used at a second module."""


@dataclass(frozen=True, kw_only=True)
class AdapterLayout:
    """The tensors of an adapter by name and shape."""

    architecture: Architecture
    """Architecture of the adapter's model, whose vocabulary may differ from the backbone's."""
    places: dict[str, Place]
    """Places by full module name."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes by full parameter name."""
    local_names: dict[str, str]
    """Names in the bypass by full parameter name."""
    modules: dict[str, str]
    """Modules that the parameters sit at by full parameter name."""
    derived: dict[str, tuple[TensorSpec, ...]]
    """Tensors that are derived from the parameters of a module, by module."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are used at a second module: full name of the parameter by its full name
    there.
    """
    frozen: FrozenWeights | None = None
    """Weights that the adapter brings and does not train."""
    method: HasBypasses | None = None
    """The method whose tensors these are; None for weights of the model itself."""

    @classmethod
    def of(
        cls,
        config: HasBypasses,
        architecture: Architecture,
        *,
        every_target: bool = True,
        frozen: FrozenWeights | None = None,
    ) -> Self:
        """Return the layout of a method on a model.

        Args:
            architecture: that of the backbone.
            every_target: see `AdapterConfig.sites`.
            frozen: see the class.

        Raises:
            AdapterError: it fits nowhere.
        """
        if frozen is not None:
            architecture = frozen.architecture(architecture)
        sites = config.sites(architecture, every_target=every_target)
        if frozen is not None:
            sites |= frozen.sites(architecture)
        places = {
            module: Place.of(architecture, module, part, node)
            for module, (part, node) in sites.items()
        }
        # Filled in below: shapes come from `bypass`, which needs the layout's places and weights.
        layout = cls(
            architecture=architecture,
            places=places,
            shapes={},
            local_names={},
            modules={},
            derived={},
            shared=config.shared(architecture),
            frozen=frozen,
            method=config,
        )
        for module, place in places.items():
            bypass = layout.bypass(config, place, training=False)
            if specs := tuple(spec for spec in bypass.with_kind("derived") if spec.name != FROZEN):
                layout.derived[module] = specs
            layout._add(module, bypass.with_kind("parameter"))
        return layout

    def _add(self, module: str, specs: Iterable[TensorSpec]) -> None:
        for spec in specs:
            name = f"{module}.{spec.name}"
            # A shared parameter counts once, at the module that owns it.
            if name not in self.shared:
                self.shapes[name], self.local_names[name], self.modules[name] = (
                    spec.shape,
                    spec.name,
                    module,
                )

    def bypass(self, config: HasBypasses, place: Place, *, training: bool) -> Bypass:
        """Return everything that the adapter has at a place: the method's bypass, on the weight
        that it brings, if any.
        """
        module, frozen = place.module, self.frozen
        if frozen is None or module not in frozen.modules:
            return config.bypass(place, training=training)
        own = place.weights["weight"]
        # The adapter only brings a weight here; the method itself has nothing at this module.
        if module not in config.sites(self.architecture, every_target=False):
            return with_frozen_weight(None, own)
        return with_frozen_weight(config.bypass(place, training=training), own)

    @property
    def sites(self) -> dict[str, tuple[Part, str]]:
        """Return (part, node) by full module name."""
        return {module: (place.part, place.node.name) for module, place in self.places.items()}

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def num_derived(self) -> int:
        """Return the elements of derived tensors; one at several places counts once."""
        # Such as VeRA's projections, which all modules share.
        kinds = {(spec.name, spec.shape) for specs in self.derived.values() for spec in specs}
        return sum(prod(shape) for _, shape in kinds)

    @property
    def num_frozen(self) -> int:
        """Return the elements of the weights that are not trained. They exist in the compute dtype
        alone.
        """
        return (
            0
            if self.frozen is None
            else sum(map(prod, self.frozen.shapes(self.architecture).values()))
        )

    @property
    def largest(self) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of the largest tensor."""
        shapes = dict(self.shapes)
        if self.frozen is not None:
            shapes |= {
                f"{name}.weight": shape
                for name, shape in self.frozen.shapes(self.architecture).items()
            }
        return max(shapes.items(), key=lambda item: prod(item[1]), default=("", ()))
