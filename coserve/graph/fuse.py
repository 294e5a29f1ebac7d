"""Fusion: neighbouring operators of a graph that one kernel computes become one operator.

`FUSIONS` is the table of what can be fused. A row is a pattern of operators and the operator that
replaces it; a backend lists the operators that it has kernels for (`Backend.fused`), and only rows
of these apply. A fused operator (`operators/fused.py`) also says what it was made of, which runs
for tensors that the kernel is not for.

A new fast path is a row, its operator, and a kernel.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from coserve.graph.ir import Graph, Node
from coserve.graph.tensors import TensorSpec


@dataclass(frozen=True)
class Pattern:
    """A node to look for, and the nodes that make what it reads."""

    ops: tuple[str, ...]
    """Operators that the node may have."""
    inputs: Mapping[str, "str | Pattern"]
    """By slot: the slot in which the fused operator takes that tensor, or the node that makes it,
    which no other node may read. A name that occurs twice stands for one tensor."""
    output: str = ""
    """The fused operator's output slot for what this node makes, where that is kept; "": it must
    not be kept."""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A row of the table."""

    fused: str
    """Name of the operator that replaces the nodes."""
    pattern: Pattern


def _half(name: str) -> Pattern:
    """A factor of a gated unit."""
    slots = {slot: f"{name}_{slot}" for slot in ("weight", "bias", "narrow", "factor")}
    return Pattern(("linear", "linear_and_low_rank"), {"x": "x", **slots}, output=name)


_LINEAR = Pattern(("linear",), {"x": "x", "weight": "weight", "bias": "bias"})
_LOW_RANK = Pattern(("low_rank",), {"x": "narrow", "weight": "factor"})
# A row may be made of what the rows before it gave.
FUSIONS = (
    Fusion(fused="linear_and_low_rank", pattern=Pattern(("add",), {"a": _LINEAR, "b": _LOW_RANK})),
    Fusion(fused="linear_onto", pattern=Pattern(("add",), {"a": "onto", "b": _LINEAR})),
    Fusion(fused="linear_onto", pattern=Pattern(("add",), {"a": _LINEAR, "b": "onto"})),
    Fusion(
        fused="gated_linear",
        pattern=Pattern(("silu_mul",), {"gate": _half("gate"), "up": _half("up")}),
    ),
)
# Operators that neighbours which run at once (`Graph.runs`) have in common if one of them has it:
# without its optional inputs, each is the other.
_GENERAL = {"linear": "linear_and_low_rank"}


@dataclass(frozen=True, kw_only=True)
class GradientFusion:
    """A row for backward passes: two nodes that read the same rows x, and of which the gradients of
    x are one.
    """

    fused: str
    """Name of the operator that does what both nodes do."""
    first: str
    """Operator of the node that is reversed first."""
    slots: Mapping[str, str]
    """Names of the first node's slots in the fused operator, which has those of the other node as
    they are."""
    then: str
    """Operator of the node that is reversed right after."""


GRADIENT_FUSIONS = (
    GradientFusion(
        fused="linear_beside_low_rank",
        first="low_rank",
        slots={"weight": "factor", "y": "narrow"},
        then="linear",
    ),
)


def beside(first: Node, then: Node, operators: Collection[str]) -> Node | None:
    """Return the node that gives the gradient of x of two that are reversed one right after the
    other; None where no row is for them.

    Args:
        operators: fused operators that may be used.
    """
    for row in GRADIENT_FUSIONS:
        is_for_both = (first.op, then.op) == (row.first, row.then) and first.input[
            "x"
        ] == then.input["x"]
        if row.fused in operators and is_for_both:
            inputs, outputs = (
                tuple((row.slots[slot], name) for slot, name in pairs if slot in row.slots)
                for pairs in (first.inputs, first.outputs)
            )
            return Node(
                name=then.name,
                op=row.fused,
                inputs=then.inputs + inputs,
                outputs=then.outputs + outputs,
            )
    return None


def fuse(
    graph: Graph,
    operators: Collection[str],
    kept: Collection[str] = (),
    rooms: Collection[str] = (),
) -> Graph:
    """Return a graph that computes the same with fewer nodes.

    Args:
        operators: fused operators that may be used.
        kept: tensors that are read by others than the graph's nodes.
        rooms: those of them that a kernel may write to where they are kept, which is given as
            `room_name`.
    """
    rows = [row for row in FUSIONS if row.fused in operators]
    if not rows:
        return graph
    readers = Counter(name for node in graph.nodes for name in node.input.values())
    single = {name for name, count in readers.items() if count == 1} - set(graph.outputs)
    nodes: dict[str, Node] = {}
    producer: dict[str, Node] = {}
    found_rooms = list[TensorSpec]()
    for node in graph.nodes:
        for row in rows:
            found = _Match(producer, single.difference(kept), single.intersection(rooms))
            if found.is_at(node, row.pattern):
                for inner in found.inside:
                    del nodes[inner.name]
                found_rooms += [
                    replace(graph.spec[name], name=room_name(name))
                    for name in found.outputs.values()
                ]
                node = found.fused(node, row.fused)
                break
        nodes[node.name] = node
        producer.update(dict.fromkeys(node.output.values(), node))
    made = {name for node in nodes.values() for name in node.output.values()}
    gone = {name for node in graph.nodes for name in node.output.values()} - made
    tensors = [tensor for tensor in graph.tensors if tensor.name not in gone]
    tensors += [replace(room, kind="constant") for room in found_rooms]
    return _with_general(
        Graph(tensors=tuple(tensors), nodes=tuple(nodes.values()), outputs=graph.outputs)
    )


def room_name(tensor: str) -> str:
    """Return the name by which a fused operator reads where a tensor is to be written."""
    return f"{tensor}.room"


class _Match:
    """A pattern that is being held against a graph."""

    def __init__(
        self, producer: Mapping[str, Node], free: Collection[str], rooms: Collection[str]
    ) -> None:
        """producer: of each tensor. free: tensors that one node reads and nobody keeps; rooms: that
        are kept, too.
        """
        self._producer, self._free, self._rooms = producer, free, rooms
        self.inputs: dict[str, str] = {}
        """Tensors by slot of the fused operator."""
        self.outputs: dict[str, str] = {}
        """Tensors within the pattern that are kept, by slot of the fused operator."""
        self.inside: list[Node] = []
        """The nodes that are replaced, but for the last."""

    def is_at(self, node: Node, pattern: Pattern) -> bool:
        """Return whether a node, and those before it, are what the pattern says."""
        if (
            node.op not in pattern.ops
            or node.attributes
            or not node.input.keys() <= pattern.inputs.keys()
        ):
            return False
        return all(self._takes(name, pattern.inputs[slot]) for slot, name in node.inputs)

    def _takes(self, name: str, wanted: str | Pattern) -> bool:
        if isinstance(wanted, str):
            return self.inputs.setdefault(wanted, name) == name
        if (made_by := self._producer.get(name)) is None:
            return False
        if name in self._rooms and wanted.output:
            self.outputs[wanted.output] = name
        elif name not in self._free:
            return False
        self.inside.append(made_by)
        return self.is_at(made_by, wanted)

    def fused(self, last: Node, op: str) -> Node:
        """Return the node that replaces those that were found."""
        rooms = {f"{slot}_room": room_name(name) for slot, name in self.outputs.items()}
        inputs, outputs = (
            (*self.inputs.items(), *rooms.items()),
            (*last.outputs, *self.outputs.items()),
        )
        return Node(name=last.name, op=op, inputs=inputs, outputs=outputs)


def _with_general(graph: Graph) -> Graph:
    """Have neighbours that read the same rows run at once although one of them is fused and another
    is not.
    """
    nodes = list(graph.nodes)
    for first, last in _neighbours(nodes):
        ops = {node.op for node in nodes[first:last]}
        if len(ops) > 1:
            nodes[first:last] = [
                replace(node, op=_GENERAL.get(node.op, node.op)) for node in nodes[first:last]
            ]
    return replace(graph, nodes=tuple(nodes))


def _neighbours(nodes: Sequence[Node]) -> Iterator[tuple[int, int]]:
    """The places of neighbours that may have one operator in common and read the same rows."""

    def kind(place: int) -> tuple[str, str]:
        node = nodes[place]
        general = _GENERAL.get(node.op, node.op)
        return (general, node.input["x"]) if general in _GENERAL.values() else ("", node.name)

    for _, places in groupby(range(len(nodes)), key=kind):
        found = list(places)
        yield found[0], found[-1] + 1
