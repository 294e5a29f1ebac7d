"""Modules that are trained as a whole beside a method's targets (PEFT's `modules_to_save`): embeddings, the head,
norms.

The adapter has weights of its own for them. Its bypass runs the module's operator on these, and takes away what the
module itself gave.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from coserve.adapters.places import Place, Site
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.models.base import Architecture, Part

PREFIX = "modules_to_save."
_IDS = ("tokens", "positions")


def whole_sites(architecture: Architecture, names: Collection[str]) -> dict[str, tuple[Part, str]]:
    """Full module name -> (part, node) of the modules whose names end with one of these, and that have weights."""
    return {
        module: (part, node.name)
        for part in architecture.parts
        for node in architecture.graphs[part].nodes
        if (module := architecture.prefix(part) + node.name) and is_one_of(module, names)
        if "weight" in node.input
    }


def is_one_of(module: str, names: Collection[str]) -> bool:
    """Whether a module's dotted name ends with one of these."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def whole_bypass(place: Place) -> Bypass:
    """What changes at a module that has other weights."""
    b, node = GraphBuilder(), place.node
    source, tensor = node.inputs[0]
    is_id = tensor in _IDS
    read = {source: b.constant(tensor, dtype=torch.int64) if is_id else b.rows("x", place.inputs)}
    for slot, shape in place.weights.items():
        read[slot] = b.parameter(f"{PREFIX}{slot}", *shape)
    ours = b.apply(node.op, "ours", read, **node.attribute)
    theirs = b.apply("scale", "theirs", {"x": b.rows("y", place.outputs)}, factor=-1.0)
    return Bypass(graph=b.build(b.apply("add", "change", {"a": ours, "b": theirs})))


def whole_initial(parameter: str, site: Site) -> Tensor:
    """The module's own weight, float32, on the CPU."""
    return site.bias.cpu().clone() if parameter.endswith(".bias") else site.dense_weight.cpu().clone()
