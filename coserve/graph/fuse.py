"""Fusion: nodes of a graph, or instructions of a backward pass, that become one.

`graph/fusions.py` is the table of what can be fused. A backend lists the fused operators that it
has kernels for (`Backend.fused`), and only rows of these apply. A fused operator
(`operators/fused.py`) runs what it was made of where the kernel is not for its tensors.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from coserve.graph.fusions import (
    FUSIONS,
    GRADIENT_FUSIONS,
    LOSS_FUSIONS,
    SIBLING_FUSIONS,
    Fusion,
    Pattern,
)
from coserve.graph.ir import Graph, Node
from coserve.graph.tensors import TensorSpec


def beside(first: Node, then: Node, operators: Collection[str]) -> Node | None:
    """Return the node that gives the gradient of x for two nodes that are reversed one right after
    the other; None where no row is for them.

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
        kept: tensors that others read, beside the graph's nodes.
        rooms: those of them that a kernel may write to where they are kept. It reads that place as
            the constant `room_name`.
    """
    rows = [row for row in FUSIONS if row.fused in operators]
    return _fused(graph, rows, kept, rooms) if rows else graph


def fuse_loss(graph: Graph) -> Graph:
    """Return a head's graph whose last product and loss are one operator, if nothing else reads the
    logits.
    """
    return _fused(graph, LOSS_FUSIONS)


def _fused(
    graph: Graph,
    rows: Sequence[Fusion],
    kept: Collection[str] = (),
    rooms: Collection[str] = (),
) -> Graph:
    # Nodes are visited in execution order, so a row also matches what earlier rows replaced.
    # A tensor can vanish into a fused node only if no one but the matching node reads it.
    readers = Counter(name for node in graph.nodes for name in node.input.values())
    single = {name for name, count in readers.items() if count == 1} - set(graph.outputs)
    nodes: dict[str, Node] = {}
    producer: dict[str, Node] = {}
    constants = list[TensorSpec]()
    for node in graph.nodes:
        # The first row that matches wins, so a table lists more specific rows first.
        for row in rows:
            match = _Match(producer, single.difference(kept), single.intersection(rooms))
            if match.is_at(node, row.pattern):
                # The fused node stands where the last of its nodes stood: all its inputs exist by
                # then.
                for inner in match.inside:
                    del nodes[inner.name]
                constants += [
                    replace(graph.spec[name], name=room_name(name), kind="constant")
                    for name in match.rooms.values()
                ]
                node = match.fused(node, row.fused)
                break
        nodes[node.name] = node
        producer.update(dict.fromkeys(node.output.values(), node))
    computed = {name for node in nodes.values() for name in node.output.values()}
    gone = {name for node in graph.nodes for name in node.output.values()} - computed
    tensors = [tensor for tensor in graph.tensors if tensor.name not in gone]
    return _with_general(
        Graph(tensors=(*tensors, *constants), nodes=tuple(nodes.values()), outputs=graph.outputs)
    )


def room_name(tensor: str) -> str:
    """Return the name by which a fused operator reads the place where it writes a tensor."""
    return f"{tensor}.room"


class _Match:
    """A pattern that is being compared with a graph.

    Args:
        producer: the node that makes each tensor.
        free: tensors that one node reads and nothing keeps.
        rooms: tensors that one node reads, and that a kernel may write to where they are kept.
    """

    def __init__(
        self, producer: Mapping[str, Node], free: Collection[str], rooms: Collection[str]
    ) -> None:
        self._producer, self._free, self._may_have_room = producer, free, rooms
        self._inputs: dict[str, str] = {}
        self._outputs: dict[str, str] = {}
        self._attributes: dict[str, Any] = {}
        self.rooms: dict[str, str] = {}
        """Tensors within the pattern that are kept, by the fused operator's output slot."""
        self.inside: list[Node] = []
        """The nodes that are replaced, but for the last."""

    def is_at(self, node: Node, pattern: Pattern) -> bool:
        """Return whether a node, and those before it, match the pattern."""
        # A node may leave optional slots of the pattern empty, but may not have others.
        if node.op not in pattern.ops or not node.input.keys() <= pattern.inputs.keys():
            return False
        if pattern.attributes is not None:
            self._attributes |= {name: node.attribute[name] for name in pattern.attributes}
        elif node.attributes:
            return False
        return all(self._takes(name, pattern.inputs[slot]) for slot, name in node.inputs)

    def _takes(self, name: str, wanted: str | Pattern) -> bool:
        if isinstance(wanted, str):
            # The slot's first tensor is remembered; the same slot elsewhere must be the same
            # tensor.
            return self._inputs.setdefault(wanted, name) == name
        if (made_by := self._producer.get(name)) is None:
            return False
        # A tensor that is kept can only be fused away if the kernel writes it to where it is kept.
        if wanted.output and not wanted.is_output and name in self._may_have_room:
            self.rooms[wanted.output] = name
        elif name not in self._free:
            return False
        if wanted.is_output:
            self._outputs[wanted.output] = name
        self.inside.append(made_by)
        return self.is_at(made_by, wanted)

    def fused(self, last: Node, op: str) -> Node:
        """Return the node that replaces those that match."""
        rooms = {f"{slot}_room": room_name(name) for slot, name in self.rooms.items()}
        return Node(
            name=last.name,
            op=op,
            inputs=(*self._inputs.items(), *rooms.items()),
            outputs=(*last.outputs, *self.rooms.items(), *self._outputs.items()),
            attributes=tuple(self._attributes.items()),
        )


def _with_general(graph: Graph) -> Graph:
    """Give neighbours that read the same rows one operator, although only some of them are fused.

    They can then run at once (`Graph.runs`).
    """
    nodes = list(graph.nodes)
    # Nodes of one operator already run at once; only mixed neighbours need the general one.
    for first, last in _siblings(nodes):
        ops = {node.op for node in nodes[first:last]}
        if len(ops) > 1:
            nodes[first:last] = [
                replace(node, op=SIBLING_FUSIONS[node.op].general) for node in nodes[first:last]
            ]
    return replace(graph, nodes=tuple(nodes))


def _siblings(nodes: Sequence[Node]) -> Iterator[tuple[int, int]]:
    """Yield the places of neighbours that may have one operator and read the same rows."""

    def kind(place: int) -> tuple[str, str]:
        node = nodes[place]
        if (row := SIBLING_FUSIONS.get(node.op)) is None:
            # A key of its own, so that a node without a row is alone in its group.
            return "", node.name
        return row.general, node.input[row.shared]

    for _, places in groupby(range(len(nodes)), key=kind):
        first, *others = places
        yield first, (others[-1] if others else first) + 1
