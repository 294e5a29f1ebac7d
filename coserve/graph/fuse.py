"""Fusion: neighbouring operators of a graph that one kernel computes become one operator.

`FUSIONS` is the table of what can be fused. A row is a pattern of operators and the operator that replaces it; a
backend lists the operators that it has kernels for (`Backend.fused`), and only rows of these apply. A fused operator
(`operators/fused.py`) also says what it was made of, which runs for tensors that the kernel is not for.

A new fast path is a row, its operator, and a kernel.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from coserve.graph.ir import Graph, Node


@dataclass(frozen=True)
class Pattern:
    """A node to look for, and the nodes that make what it reads."""

    op: str
    inputs: Mapping[str, "str | Pattern"]
    """By slot: the slot in which the fused operator takes that tensor, or the node that makes it, which nobody else may
    read. A name that occurs twice stands for one tensor."""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A row of the table."""

    fused: str
    """Name of the operator that replaces the nodes."""
    pattern: Pattern


def _linear(x: str, weight: str, bias: str) -> Pattern:
    return Pattern("linear", {"x": x, "weight": weight, "bias": bias})


FUSIONS = (
    Fusion(fused="linear_onto", pattern=Pattern("add", {"a": "onto", "b": _linear("x", "weight", "bias")})),
    Fusion(fused="linear_onto", pattern=Pattern("add", {"a": _linear("x", "weight", "bias"), "b": "onto"})),
    Fusion(
        fused="gated_linear",
        pattern=Pattern(
            "silu_mul",
            {"gate": _linear("x", "gate_weight", "gate_bias"), "up": _linear("x", "up_weight", "up_bias")},
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class GradientFusion:
    """A row for backward passes: two nodes that read the same rows x, and of which the gradients of x are one."""

    fused: str
    """Name of the operator that does what both nodes do."""
    first: str
    """Operator of the node that is reversed first."""
    slots: Mapping[str, str]
    """Names of the first node's slots in the fused operator, which has those of the other node as they are."""
    then: str
    """Operator of the node that is reversed right after."""


GRADIENT_FUSIONS = (
    GradientFusion(
        fused="linear_beside_low_rank", first="low_rank", slots={"weight": "factor", "y": "narrow"}, then="linear"
    ),
)


def beside(first: Node, then: Node, operators: Collection[str]) -> Node | None:
    """Return the node that gives the gradient of x of two that are reversed one right after the other; None where no
    row is for them.

    Args:
        operators: fused operators that may be used.
    """
    for row in GRADIENT_FUSIONS:
        is_for_both = (first.op, then.op) == (row.first, row.then) and first.input["x"] == then.input["x"]
        if row.fused in operators and is_for_both:
            inputs, outputs = (
                tuple((row.slots[slot], name) for slot, name in pairs if slot in row.slots)
                for pairs in (first.inputs, first.outputs)
            )
            return Node(name=then.name, op=row.fused, inputs=then.inputs + inputs, outputs=then.outputs + outputs)
    return None


def fuse(graph: Graph, operators: Collection[str], kept: Collection[str] = ()) -> Graph:
    """Return a graph that computes the same with fewer nodes.

    Args:
        operators: fused operators that may be used.
        kept: tensors that are read by others than the graph's nodes.
    """
    rows = [row for row in FUSIONS if row.fused in operators]
    if not rows:
        return graph
    readers = Counter(name for node in graph.nodes for name in node.input.values())
    single = {name for name, count in readers.items() if count == 1} - {*kept, *graph.outputs}
    nodes: dict[str, Node] = {}
    producer: dict[str, Node] = {}
    for node in graph.nodes:
        for row in rows:
            found = _Match(producer, single)
            if found.is_at(node, row.pattern):
                for inner in found.inside:
                    del nodes[inner.name]
                node = Node(name=node.name, op=row.fused, inputs=tuple(found.inputs.items()), outputs=node.outputs)
                break
        nodes[node.name] = node
        producer.update(dict.fromkeys(node.output.values(), node))
    gone = {name for node in graph.nodes for name in node.output.values()} - set(_made(nodes.values()))
    tensors = tuple(tensor for tensor in graph.tensors if tensor.name not in gone)
    return Graph(tensors=tensors, nodes=tuple(nodes.values()), outputs=graph.outputs)


class _Match:
    """A pattern that is being held against a graph."""

    def __init__(self, producer: Mapping[str, Node], single: Collection[str]) -> None:
        """producer: of each tensor. single: tensors that one node alone reads."""
        self._producer, self._single = producer, single
        self.inputs: dict[str, str] = {}
        """Tensors by slot of the fused operator."""
        self.inside: list[Node] = []
        """The nodes whose results nobody else reads."""

    def is_at(self, node: Node, pattern: Pattern) -> bool:
        """Return whether a node, and those before it, are what the pattern says."""
        if node.op != pattern.op or node.attributes or not node.input.keys() <= pattern.inputs.keys():
            return False
        return all(self._takes(name, pattern.inputs[slot]) for slot, name in node.inputs)

    def _takes(self, name: str, wanted: str | Pattern) -> bool:
        if isinstance(wanted, str):
            return self.inputs.setdefault(wanted, name) == name
        made_by = self._producer.get(name)
        if made_by is None or name not in self._single:
            return False
        self.inside.append(made_by)
        return self.is_at(made_by, wanted)


def _made(nodes: Collection[Node]) -> Iterator[str]:
    return (name for node in nodes for name in node.output.values())
