"""Bottleneck adapters: y + scaling * (up f(down y + b) + c) after attention and after the MLP.
Source: arXiv 1902.00751 (Houlsby); settings and initial values as in
https://docs.adapterhub.ml/methods.html#bottleneck-adapters. PEFT has none: directories have the
same two files, with these settings and AdapterHub's names of parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.places import Place, Site
from coserve.adapters.settings import TargetedConfig
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.settings import check_number, shown

_ACTIVATIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "swish": ("silu", {}),
    "silu": ("silu", {}),
    "relu": ("relu", {}),
    "gelu": ("gelu", {"approximate": "none"}),
    "gelu_new": ("gelu", {"approximate": "tanh"}),
}
# A "bottleneck" of this many times the module's width is the widest.
_MIN_REDUCTION = 1 / 16
_DOWN, _UP = "adapter_down.0", "adapter_up"


@dataclass(frozen=True, kw_only=True)
class BottleneckConfig(TargetedConfig):
    """Bottleneck adapters with AdapterHub's settings."""

    peft_type = "BOTTLENECK"
    job_defaults: ClassVar[Mapping[str, Any]] = {}
    peft_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("reduction_factor", "non_linearity", "scaling")},
        **TargetedConfig.target_names,
        **TargetedConfig.whole_names,
    }
    supported = "bottleneck adapters on the outputs of linear layers"

    target_modules: str | tuple[str, ...] = ("o_proj", "down_proj")
    """The last layers of attention and of the MLP, on whose outputs adapters sit."""
    reduction_factor: float = 16
    """Features of the module for each of the bottleneck."""
    non_linearity: str = "swish"
    """The activation function f."""
    scaling: float = 1.0
    """Factor of the result that is added."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("reduction_factor", self.reduction_factor, least=_MIN_REDUCTION)
        check_number("scaling", self.scaling)
        if self.non_linearity not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(
                f"non_linearity must be one of {known}, not {shown(self.non_linearity)}"
            )

    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        b, width = GraphBuilder(), place.outputs
        size = max(1, int(width / self.reduction_factor))
        operator, attributes = _ACTIVATIONS[self.non_linearity]
        down = {
            "weight": b.parameter(f"{_DOWN}.weight", size, width),
            "bias": b.parameter(f"{_DOWN}.bias", size),
        }
        up = {
            "weight": b.parameter(f"{_UP}.weight", width, size),
            "bias": b.parameter(f"{_UP}.bias", width),
        }
        # Reads y, not x: the adapter sits on the layer's output.
        h = b.apply("linear", "down", {"x": b.rows("y", width), **down})
        y = b.apply("linear", "up", {"x": b.apply(operator, "act", {"x": h}, **attributes), **up})
        if self.scaling != 1:
            y = b.apply("scale", "scaled", {"x": y}, factor=self.scaling)
        return Bypass(graph=b.build(y))

    def target_initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        """Return the initial value of a parameter: near the identity, as in the paper."""
        return (
            torch.zeros(shape).normal_(0, 0.02, generator=generator)
            if len(shape) > 1
            else torch.zeros(shape)
        )
