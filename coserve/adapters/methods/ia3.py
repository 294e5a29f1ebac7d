"""IA3: the outputs of attention's layers, and the inputs of feed-forward layers, times learned
vectors. Source: arXiv 2205.05638; `feedforward_modules` as in
https://huggingface.co/docs/peft/package_reference/ia3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.places import Place, Site
from coserve.adapters.settings import TargetedConfig
from coserve.adapters.targets import Targets
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder


@dataclass(frozen=True, kw_only=True)
class Ia3Config(TargetedConfig):
    """IA3 with PEFT's settings."""

    peft_type = "IA3"
    target_names: ClassVar[Mapping[str, str]] = {
        name: name for name in ("target_modules", "exclude_modules")
    }
    peft_names: ClassVar[Mapping[str, str]] = {
        **target_names,
        **TargetedConfig.whole_names,
        "feedforward_modules": "feedforward_modules",
    }
    constants: ClassVar[Mapping[str, Any]] = {"fan_in_fan_out": False}
    harmless = frozenset(("init_ia3_weights",))
    supported = "IA3 on linear layers"

    target_modules: str | tuple[str, ...] = ("k_proj", "v_proj", "down_proj")
    """Modules that are scaled; see `Targets`."""
    feedforward_modules: str | tuple[str, ...] = ("down_proj",)
    """Modules among these whose input is scaled instead of their output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.feedforward_modules, list | set):
            object.__setattr__(self, "feedforward_modules", tuple(self.feedforward_modules))
        targets, inner = self.target_modules, self.feedforward_modules
        if (
            isinstance(targets, tuple)
            and isinstance(inner, tuple)
            and (unknown := sorted(set(inner) - set(targets)))
        ):
            raise ValueError(
                f"feedforward_modules {', '.join(unknown)} must be among the target_modules; [] "
                f"for none"
            )
        self._feedforward  # noqa: B018 (it checks itself)

    @cached_property
    def _feedforward(self) -> Targets | None:
        return Targets(modules=self.feedforward_modules) if self.feedforward_modules else None

    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        # The output is scaled, y * l: a gain on y itself.
        if self._feedforward is None or not self._feedforward.chooses(place.module):
            factor = b.parameter("ia3_l", place.outputs, 1)
            return Bypass(
                graph=b.build(
                    b.apply("gain", "change", {"x": b.rows("y", place.outputs), "factor": factor})
                )
            )
        factor = b.parameter("ia3_l", 1, place.inputs)
        x = b.apply("gain", "change_of_input", {"x": b.rows("x", place.inputs), "factor": factor})
        # The input is scaled: W (x * l) - W x = W (x * (l - 1)), the site's own weight once more.
        weight = b.weight("weight", place.outputs, place.inputs)
        return Bypass(graph=b.build(b.apply("linear", "change", {"x": x, "weight": weight})))

    def target_initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        return torch.ones(shape)

    def target_merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        factor = parameters["ia3_l"]
        found = {"weight": site.dense_weight * factor}
        # Only a scaled output [out, 1] scales the bias; a scaled input [1, in] comes before it.
        if site.place.has_bias and factor.shape[1] == 1:
            found["bias"] = site.bias * factor[:, 0]
        return found
