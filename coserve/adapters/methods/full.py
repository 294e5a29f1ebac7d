"""Full fine-tuning: the model's own weights, or chosen parts of them, are trained where they are
served.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.full_weights import FullWeights, weight_places
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.patterns import check_sizes
from coserve.adapters.places import Place, Site
from coserve.adapters.settings import NamedConfig
from coserve.adapters.whole_modules import is_one_of
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.models.backbone import Backbone
from coserve.models.base import Architecture, Part
from coserve.models.weights import quantisation_of_model
from coserve.settings import MOST_WHOLE, is_whole, shown


@dataclass(frozen=True, kw_only=True)
class FullConfig(NamedConfig):
    """Full fine-tuning's settings."""

    peft_type = "FULL"
    peft_names: ClassVar[Mapping[str, str]] = {
        name: name for name in ("target_modules", "layers_to_transform")
    }
    supported = "full fine-tuning"
    is_model = True

    target_modules: tuple[str, ...] = ()
    """Ends of names of modules whose weights are trained; empty: all."""
    layers_to_transform: tuple[int, ...] = ()
    """Indices of blocks whose weights are trained, and then nothing outside of blocks; empty: all.
    """

    def __post_init__(self) -> None:
        for name in ("target_modules", "layers_to_transform"):
            if isinstance(value := getattr(self, name), list):  # from JSON
                object.__setattr__(self, name, tuple(value))
        targets, layers = self.target_modules, self.layers_to_transform
        if not isinstance(targets, tuple) or not all(isinstance(each, str) for each in targets):
            raise ValueError(f"target_modules must be a list of names, not {shown(targets)}")
        check_sizes("target_modules", targets)
        if not isinstance(layers, tuple) or not all(
            is_whole(each, 0, MOST_WHOLE) for each in layers
        ):
            raise ValueError(
                f"layers_to_transform must be a list of whole numbers, not {shown(layers)}"
            )

    def chosen(self, architecture: Architecture) -> dict[str, tuple[Part, str]]:
        """Return (part, name in its graph) of the weights that are trained, by full name.

        Raises:
            AdapterError: there are none, or the model's files have no place for them.
        """
        if (quantisation := quantisation_of_model(architecture)) is not None:
            raise AdapterError(
                f"full fine-tuning writes weights as floats, and this model is quantised "
                f"({quantisation.words}): serve "
                "the model that it was made from, or train an adapter"
            )
        found = {
            name: (part, local)
            for name, (part, local) in weight_places(architecture).items()
            if (not self.layers_to_transform or part in self.layers_to_transform)
            and (not self.target_modules or is_one_of(name.rpartition(".")[0], self.target_modules))
        }
        if not found:
            raise AdapterError(
                "target_modules and layers_to_transform leave no weight of this model to train"
            )
        return found

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        """Return nothing: there are no bypasses."""
        self.chosen(architecture)
        return {}

    def sizes(self, architecture: Architecture) -> AdapterLayout:
        shapes = {name: architecture.weight_shapes[name] for name in self.chosen(architecture)}
        return AdapterLayout(
            architecture=architecture,
            places={},
            shapes=shapes,
            local_names={},
            modules={},
            derived={},
        )

    def create(self, backbone: Backbone, *, seed: int) -> Adapter:
        return FullWeights(backbone, self, self.chosen(backbone.architecture))

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        raise AssertionError("there are none")

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        raise AssertionError("there are none")
