"""Bypasses: how an adapter sits on a graph without changing it (FlexLLM section 4.1, MuxTune section 3.2).

A bypass takes one tensor of the backbone and gives one tensor that is added to the output of one of its nodes, the
site: ``y = backbone(x) + bypass(x)``. Rows without an adapter run the backbone's graph as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from coserve.errors import GraphError
from coserve.graph.ir import Graph, Node, renamed


@dataclass(frozen=True, kw_only=True)
class Bypass:
    """A small graph with one row input, parameters of its own, any constants, and one output as wide as the site's.

    reads: whether the row input stands for the site's input (LoRA) or for its output before the sum (IA3, bottleneck
    adapters).
    """

    graph: Graph
    reads: Literal["input", "output"] = "input"

    def __post_init__(self) -> None:
        inputs = [tensor for tensor in self.graph.with_kind("row") if tensor.name not in self.graph.producer]
        if len(inputs) != 1 or len(self.graph.outputs) != 1 or self.graph.with_kind("weight"):
            raise GraphError("a bypass has one row input, one output and no weights of the backbone")

    @property
    def source(self) -> str:
        """Name of the row input."""
        return next(tensor.name for tensor in self.graph.with_kind("row") if tensor.name not in self.graph.producer)


@dataclass(frozen=True, kw_only=True)
class AttachedBypass:
    """A bypass at its site, with the tensor names of the host graph."""

    nodes: tuple[Node, ...]
    source: str  # the tensor it reads
    base: str  # the site's own output, before the sum
    result: str  # what it adds


@dataclass(frozen=True, kw_only=True)
class AttachedGraph:
    """A graph with its bypasses as nodes (what is differentiated), and the bypasses by site (what rows of the adapter
    run).
    """

    graph: Graph
    bypasses: Mapping[str, AttachedBypass]


def attach(graph: Graph, bypasses: Mapping[str, Bypass]) -> AttachedGraph:
    """Put each bypass at the node that its key names.

    Tensors and nodes of a bypass get the site's name in front (parameter `lora_A.weight` at `self_attn.q_proj` becomes
    `self_attn.q_proj.lora_A.weight`); constants keep theirs. The sum takes over the name of the site's output.
    """
    if unknown := [site for site in bypasses if site not in graph.node]:
        raise GraphError(f"no node {', '.join(unknown)} to attach a bypass to")
    tensors, nodes, attached_bypasses = dict(graph.spec), [], {}
    for node in graph.nodes:
        if node.name not in bypasses:
            nodes.append(node)
            continue
        bypass, site = bypasses[node.name], node.name
        slot, output = node.outputs[0]
        base = f"{site}.base"
        source = base if bypass.reads == "output" else node.inputs[0][1]
        names = {bypass.source: source}
        for tensor in bypass.graph.tensors:
            if tensor.name == bypass.source:
                if tensor.shape != (expected := graph.spec[output if bypass.reads == "output" else source].shape):
                    raise GraphError(f"the bypass at {site} takes rows of {tensor.shape}, the site has {expected}")
                continue
            name = tensor.name if tensor.kind == "constant" else f"{site}.{tensor.name}"
            names[tensor.name] = name
            tensors[name] = replace(tensor, name=name)
        result = names[bypass.graph.outputs[0]]
        if tensors[result].shape != graph.spec[output].shape:
            raise GraphError(
                f"the bypass at {site} gives rows of {tensors[result].shape}, not {graph.spec[output].shape}"
            )
        tensors[base] = replace(graph.spec[output], name=base)
        inner = tuple(renamed(member, names, prefix=f"{site}.") for member in bypass.graph.nodes)
        nodes.append(replace(node, outputs=((slot, base), *node.outputs[1:])))
        nodes.extend(inner)
        nodes.append(Node(name=f"{site}.sum", op="add", inputs=(("a", base), ("b", result)), outputs=(("y", output),)))
        attached_bypasses[site] = AttachedBypass(nodes=inner, source=source, base=base, result=result)
    attached = Graph(tensors=tuple(tensors.values()), nodes=tuple(nodes), outputs=graph.outputs)
    return AttachedGraph(graph=attached, bypasses=attached_bypasses)
