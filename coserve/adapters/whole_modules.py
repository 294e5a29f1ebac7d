"""Modules that are trained as a whole beside a method's targets (PEFT's `modules_to_save`):
embeddings, the head, norms, linear layers.

The adapter has weights of its own for them, with which its rows run the modules' operators.
"""

from collections.abc import Collection, Iterator

from torch import Tensor

from coserve.adapters.places import Place, Site
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.graph.ir import Graph, Node
from coserve.graph.tensors import TensorSpec
from coserve.models.base import Architecture, Part
from coserve.models.stored import AsItIs

PREFIX = "modules_to_save."
_OPERATORS = ("embedding", "linear", "rms_norm", "layer_norm")


def whole_sites(architecture: Architecture, names: Collection[str]) -> dict[str, tuple[Part, str]]:
    """Return full module name -> (part, node) of the modules with weights that PEFT's
    `modules_to_save` means.

    Raises:
        AdapterError: one of them cannot be trained as a whole here.
    """
    found: dict[str, tuple[Part, str]] = {}
    for part in architecture.parts if names else ():
        graph = architecture.graphs[part]
        for node in graph.nodes:
            module = architecture.prefix(part) + node.name
            if is_whole(module, names) and _weights_of(node, graph):
                _check_can_be_whole(architecture, module, part, node)
                found[module] = (part, node.name)
    return found


def is_whole(module: str, names: Collection[str]) -> bool:
    """Return whether PEFT takes a module as a whole: its name, or that of a module that it is in,
    ends with one of these texts. "norm" means `model.norm` and `input_layernorm`.
    """
    return any(holder.endswith(name) for holder in _holders(module) for name in names)


def is_left_out(module: str, names: Collection[str]) -> bool:
    """Return whether PEFT leaves a module out of the targets since it is trained as a whole: one of
    these names is its own, or that of a module that it is in, dot by dot.
    """
    return any(f".{name}." in f".{module}." for name in names)


def is_one_of(module: str, names: Collection[str]) -> bool:
    """Return whether a module's dotted name ends with one of these, dot by dot."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def whole_bypass(place: Place) -> Bypass:
    """Return the bypass of a module that has weights of its own."""
    specs = {
        slot: TensorSpec(name=f"{PREFIX}{slot}", shape=shape, kind="parameter")
        for slot, shape in place.weights.items()
    }
    return Bypass(own=specs)


def whole_initial(parameter: str, site: Site) -> Tensor:
    """Return the module's own weight, float32, on the CPU."""
    return (
        site.bias.cpu().clone() if parameter.endswith(".bias") else site.dense_weight.cpu().clone()
    )


def _holders(module: str) -> Iterator[str]:
    """Yield a module's name, and the names of the modules that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _weights_of(node: Node, graph: Graph) -> list[str]:
    return [name for name in node.input.values() if graph.spec[name].kind == "weight"]


def _check_can_be_whole(architecture: Architecture, module: str, part: Part, node: Node) -> None:
    """Raise AdapterError unless a module's weights are as PEFT's files have them, and have
    gradients.
    """
    names = [
        architecture.prefix(part) + name for name in _weights_of(node, architecture.graphs[part])
    ]
    stored = [architecture.stored[name] for name in names if name in architecture.stored]
    if node.op not in _OPERATORS or any(type(each) is not AsItIs for each in stored):
        raise AdapterError(
            f"modules_to_save means {module}, which cannot be trained as a whole on this "
            f"{architecture.config.model_type}: name embeddings, lm_head, norms or dense linear "
            f"layers"
        )
