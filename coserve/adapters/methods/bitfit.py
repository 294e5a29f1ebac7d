"""BitFit: the biases of linear layers and norms are trained, and nothing else; a mixture's router
and experts keep theirs. Source: arXiv 2106.10199. PEFT has none: directories have the same two
files, with whole biases under the model's own names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coserve.adapters.base import PEFT_PREFIX
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.patterns import check_sizes
from coserve.adapters.places import Place, Site
from coserve.adapters.settings import NamedConfig
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import shown

_TRAINED = "trained_bias"
# Operators that add their bias to all rows: not those of a mixture's router and experts.
_BIASED = ("linear", "layer_norm")


@dataclass(frozen=True, kw_only=True)
class BitfitConfig(NamedConfig):
    """BitFit's settings."""

    peft_type = "BITFIT"
    peft_names: ClassVar[Mapping[str, str]] = {"target_modules": "target_modules"}
    supported = "BitFit on linear layers and norms"

    target_modules: tuple[str, ...] = ()
    """Ends of names of modules whose biases are trained; empty: all that have one, norms included.
    """

    def __post_init__(self) -> None:
        if isinstance(self.target_modules, list):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if not isinstance(self.target_modules, tuple) or not all(
            isinstance(each, str) for each in self.target_modules
        ):
            raise ValueError(
                f"target_modules must be a list of names, not {shown(self.target_modules)}"
            )
        check_sizes("target_modules", self.target_modules)

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        having = {
            architecture.prefix(part) + node.name: (part, node.name)
            for part in architecture.parts
            for node in architecture.graphs[part].nodes
            if "bias" in node.input and node.op in _BIASED
        }
        if not having:
            raise AdapterError(
                f"this {architecture.config.model_type} has no biases for BitFit to train"
            )
        chosen = {name: site for name, site in having.items() if self._matches(name)}
        if not chosen:
            known = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in having))
            wrong = ", ".join(self.target_modules)
            raise AdapterError(
                f"target_modules {wrong} matches no module with a bias of this "
                f"{architecture.config.model_type}; "
                f"it has {known}"
            )
        return chosen

    def _matches(self, module: str) -> bool:
        return not self.target_modules or any(
            f".{module}".endswith(f".{end}") for end in self.target_modules
        )

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        b, width = GraphBuilder(), place.outputs
        read = {
            "like": b.rows("y", width),
            "new": b.parameter(_TRAINED, width),
            "old": b.weight("bias", width),
        }
        return Bypass(graph=b.build(b.apply("other_vector", "change", read)))

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        # The model's own: the bypass adds new - old, which is zero at first.
        return site.bias.cpu().clone()

    def merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"bias": parameters[_TRAINED]}

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        return {
            f"{PEFT_PREFIX}{layout.modules[name]}.bias": value for name, value in values.items()
        }

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        return {
            name: tensors[f"{PEFT_PREFIX}{module}.bias"] for name, module in layout.modules.items()
        }
