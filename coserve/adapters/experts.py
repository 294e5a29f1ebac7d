"""LoRA at the experts of a mixture, PEFT's `target_parameters`: each expert's matrix has factors of
its own.

PEFT stacks them: A is [experts * rank, in], expert after expert; B is [out, rank * experts], rank
after rank. Its file names both by the module that holds the experts, and the one that was wrapped
first (gate and up) by `base_layer`, where there are two
(https://huggingface.co/docs/peft/developer_guides/lora, "Targeting nn.Parameter directly").
"""

from typing import Any

import torch
from torch import Tensor

from coserve.adapters.base import PEFT_PREFIX
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.places import Experts, Place
from coserve.adapters.principal import LORA_A, LORA_B
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part
from coserve.settings import shown

# The matrix whose wrapper PEFT puts around the other one's.
_OUTER = "down_proj"


def expert_targets(given: Any) -> tuple[str, ...]:
    """Return the setting `target_parameters`; raise ValueError for anything but names."""
    names = (
        () if given is None else tuple(given) if isinstance(given, list | set | tuple) else (given,)
    )
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"target_parameters must be a list of names, not {shown(given)}")
    return tuple(sorted(names))


def expert_sites(
    targets: tuple[str, ...], architecture: Architecture
) -> dict[str, tuple[Part, str]]:
    """Return (part, node) of the chosen matrices of experts, by full name.

    Raises:
        AdapterError: a name chooses none.
    """
    known = architecture.expert_sites

    def is_meant(name: str, target: str) -> bool:
        return name == target or name.endswith(f".{target}")

    for target in targets:
        if not any(is_meant(name, target) for name in known):
            family = architecture.config.model_type
            there = ", ".join(dict.fromkeys(node for _, node in known.values())) or "no experts"
            raise AdapterError(
                f"target_parameters {shown(target)} matches nothing of this {family}; it has "
                f"{there}"
            )
    return {
        name: site
        for name, site in known.items()
        if any(is_meant(name, target) for target in targets)
    }


def expert_bypass(place: Place, experts: Experts, rank: int, scaling: float) -> Bypass:
    """Return the bypass scaling * B_e (A_e x) for each of a row's experts e."""
    b = GraphBuilder()
    x, chosen = b.rows("x", place.inputs), b.rows("experts", experts.per_row, dtype=torch.int64)
    a = b.parameter(LORA_A, experts.num_experts, rank, experts.inputs)
    into = {"x": x, "experts": chosen, "weight": a}
    x = b.apply("expert_linear", "lora_A", into, shared=place.node.attribute["shared"])
    x = b.apply("scale", "scaled", {"x": x}, factor=scaling)
    out = b.parameter(LORA_B, experts.num_experts, experts.outputs, rank)
    y = b.apply("expert_linear", "lora_B", {"x": x, "experts": chosen, "weight": out}, shared=False)
    return Bypass(graph=b.build(y))


def expert_name(name: str, layout: AdapterLayout) -> str:
    """Return PEFT's name of a parameter."""
    module = layout.modules[name]
    holder, _, matrix = module.rpartition(".")
    is_inner = matrix != _OUTER and f"{holder}.{_OUTER}" in layout.places
    return f"{PEFT_PREFIX}{holder}.{'base_layer.' if is_inner else ''}{layout.local_names[name]}"


def to_stacked(value: Tensor, local: str) -> Tensor:
    """Return a parameter as PEFT stacks it: [experts, rank, in], or [experts, out, rank]."""
    return value.flatten(0, 1) if local == LORA_A else value.permute(1, 2, 0).flatten(1)


def from_stacked(tensor: Tensor, shape: tuple[int, ...], local: str) -> Tensor:
    """Return a parameter of this shape from the tensor in which PEFT stacks it."""
    if local == LORA_A:
        return tensor.view(shape)
    num_experts, outputs, rank = shape
    return tensor.view(outputs, rank, num_experts).permute(2, 0, 1)
