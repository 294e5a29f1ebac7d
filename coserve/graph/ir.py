"""The graph: named tensors, and nodes that apply an operator to them, in an order that can be run.

Graphs are immutable and hashable, so equal blocks share one compiled program.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from coserve.errors import GraphError
from coserve.graph.fusions import SIBLING_FUSIONS
from coserve.graph.operators import operator
from coserve.graph.operators.base import Cost, Load, Operator
from coserve.graph.tensors import Kind, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Node:
    """One application of an operator."""

    name: str
    """Name within the graph; in a model's graph, that of the module in transformers."""
    op: str
    """Name of the operator."""
    inputs: tuple[tuple[str, str], ...]
    """Pairs of an input slot and a tensor's name."""
    outputs: tuple[tuple[str, str], ...]
    """Pairs of an output slot and a tensor's name."""
    attributes: tuple[tuple[str, Any], ...] = ()
    """Pairs of an attribute's name and value."""

    @cached_property
    def operator(self) -> Operator:
        return operator(self.op)

    @cached_property
    def input(self) -> dict[str, str]:
        """Return the input tensors' names by slot."""
        return dict(self.inputs)

    @cached_property
    def output(self) -> dict[str, str]:
        """Return the output tensors' names by slot."""
        return dict(self.outputs)

    @cached_property
    def tensor(self) -> dict[str, str]:
        """Return the names of input and output tensors by slot."""
        return self.input | self.output

    @cached_property
    def attribute(self) -> dict[str, Any]:
        return dict(self.attributes)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in execution order over declared tensors.

    Checked when created: names are unique, and every tensor exists before it is read.
    """

    tensors: tuple[TensorSpec, ...]
    """All tensors: inputs, weights and what the nodes make."""
    nodes: tuple[Node, ...]
    """The nodes in execution order."""
    outputs: tuple[str, ...]
    """Names of the tensors that a run returns."""

    def __post_init__(self) -> None:
        if len(self.spec) != len(self.tensors) or len({node.name for node in self.nodes}) != len(
            self.nodes
        ):
            raise GraphError("a graph names two tensors or two nodes alike")
        computed = {name for node in self.nodes for name in node.output.values()}
        # Everything that no node makes is given from outside, and is there from the start.
        known = {name for name in self.spec if name not in computed}
        for node in self.nodes:
            if missing := [name for name in node.input.values() if name not in known]:
                raise GraphError(
                    f"node {node.name} reads {', '.join(missing)} before anything made it"
                )
            known.update(node.output.values())
        if unknown := [name for name in self.outputs if name not in known]:
            raise GraphError(f"the graph returns {', '.join(unknown)}, which nothing makes")

    @cached_property
    def spec(self) -> dict[str, TensorSpec]:
        """Return every tensor by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def node(self) -> dict[str, Node]:
        """Return every node by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """Return, by tensor name, the node that makes it; graph inputs are absent."""
        return {name: node for node in self.nodes for name in node.output.values()}

    @cached_property
    def kv_tensors(self) -> tuple[str, ...]:
        """Return the row tensors that an operator reads beyond the window it runs on (K and V).
        They are kept for later windows.
        """
        names = (node.input[slot] for node in self.nodes for slot in node.operator.whole)
        return tuple(dict.fromkeys(names))

    @cached_property
    def lead_tensors(self) -> tuple[str, ...]:
        """Return the row tensors of which a VJP reads rows before its window. It reads what is
        saved of all rows.
        """
        names = (node.input[slot] for node in self.nodes for slot in node.operator.lead)
        return tuple(dict.fromkeys(names))

    @cached_property
    def state_size(self) -> int:
        """Return the number of float32 elements that a sequence carries from row to row. At most
        one operator has such a state.
        """
        sizes = [size for node in self.nodes if (size := node.operator.state_size(node.attribute))]
        assert len(sizes) <= 1, "a block carries one state"
        return sum(sizes)

    @cached_property
    def runs(self) -> tuple[tuple[Node, ...], ...]:
        """Return the nodes in order, in runs: neighbours that run at once (`SIBLING_FUSIONS`) share
        one.
        """
        runs: list[list[Node]] = []
        for node in self.nodes:
            if runs and _are_siblings(runs[-1][0], node):
                runs[-1].append(node)
            else:
                runs.append([node])
        return tuple(map(tuple, runs))

    @cached_property
    def rewritten(self) -> dict[Hashable, Any]:
        """Return a cache of this graph's rewritten forms, by what they were rewritten for, for
        callers that need one in every step.
        """
        return {}

    @cached_property
    def frees(self) -> dict[str, tuple[str, ...]]:
        """Return, by node, the row tensors that no later node reads. A forward pass drops them
        there.
        """
        # Later nodes overwrite earlier entries, so each tensor ends with its last reader (or, if it
        # has none, with its producer).
        last = {
            name: node.name
            for node in self.nodes
            for name in (*node.output.values(), *node.input.values())
        }
        frees: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for name, node in last.items():
            if name not in self.outputs and self.spec[name].kind == "row":
                frees[node].append(name)
        return {node: tuple(names) for node, names in frees.items()}

    def with_kind(self, kind: Kind) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    def slot_specs(self, node: Node) -> dict[str, TensorSpec]:
        """Return the tensors of a node by slot."""
        return {slot: self.spec[name] for slot, name in node.tensor.items()}

    def node_cost(self, node: Node, load: Load) -> Cost:
        """Return the cost of one forward execution of a node."""
        return node.operator.cost(self.slot_specs(node), node.attribute, load)

    def cost(self, load: Load) -> Cost:
        """Return the cost of all nodes."""
        return sum((self.node_cost(node, load) for node in self.nodes), Cost())


def _are_siblings(one: Node, other: Node) -> bool:
    row = SIBLING_FUSIONS.get(one.op)
    if row is None or one.op != other.op:
        return False
    return one.input[row.shared] == other.input[row.shared]


class GraphBuilder:
    """A graph under construction, one node at a time. A node with one output names that tensor
    after itself.
    """

    def __init__(self, *tensors: TensorSpec, nodes: Iterable[Node] = ()) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._nodes = list(nodes)

    def rows(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str:
        """Declare an input with gradients (if it is of a float type), of this shape per row."""
        return self._declare(TensorSpec(name=name, shape=shape, kind="row", dtype=dtype))

    def constant(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str:
        """Declare an input without gradients, of this shape per row."""
        return self._declare(TensorSpec(name=name, shape=shape, kind="constant", dtype=dtype))

    def weight(self, name: str, *shape: int) -> str:
        """Declare a frozen weight of this whole shape."""
        return self._declare(TensorSpec(name=name, shape=shape, kind="weight"))

    def parameter(self, name: str, *shape: int) -> str:
        """Declare an adapter parameter of this whole shape."""
        return self._declare(TensorSpec(name=name, shape=shape, kind="parameter"))

    def derived(self, name: str, *shape: int) -> str:
        """Declare a tensor of this whole shape that is computed from an adapter's parameters and
        the backbone's weights.
        """
        return self._declare(TensorSpec(name=name, shape=shape, kind="derived"))

    def _declare(self, tensor: TensorSpec) -> str:
        if tensor.name in self._tensors:
            raise GraphError(f"tensor {tensor.name} is declared twice")
        self._tensors[tensor.name] = tensor
        return tensor.name

    def apply(self, op: str, name: str, inputs: Mapping[str, str | None], **attributes: Any) -> str:
        """Add a node and return the name of its first output.

        Args:
            op: name of the operator.
            name: name of the node.
            inputs: names of the input tensors by slot; None: the optional slot stays empty.
            attributes: the node's attributes.

        Raises:
            GraphError: the operator does not have these slots, or another one has to be filled.
        """
        rule = operator(op)
        filled = {slot: tensor for slot, tensor in inputs.items() if tensor is not None}
        unknown, missing = (
            set(filled) - set(rule.inputs),
            set(rule.inputs) - set(filled) - rule.optional,
        )
        if unknown or missing:
            raise GraphError(
                f"{op} takes {', '.join(rule.inputs)}; node {name} was given {', '.join(filled)}"
            )
        specs = {slot: self._tensors[tensor] for slot, tensor in filled.items()}
        shapes = rule.infer({slot: spec.shape for slot, spec in specs.items()}, attributes)
        outputs = {}
        for slot, (shape, dtype) in shapes.items():
            tensor = name if slot == rule.outputs[0] else f"{name}.{slot}"
            outputs[slot] = self._declare(
                TensorSpec(name=tensor, shape=shape, kind="row", dtype=dtype)
            )
        self._nodes.append(
            Node(
                name=name,
                op=op,
                inputs=tuple(filled.items()),
                outputs=tuple(outputs.items()),
                attributes=tuple(sorted(attributes.items())),
            )
        )
        return outputs[rule.outputs[0]]

    def linear(self, name: str, x: str, out_features: int, *, bias: bool = False) -> str:
        """Add y = x W^T (+ b), with weights `name.weight` [out, in] and `name.bias` [out]."""
        weight = self.weight(f"{name}.weight", out_features, self._tensors[x].shape[-1])
        offset = self.weight(f"{name}.bias", out_features) if bias else None
        return self.apply("linear", name, {"x": x, "weight": weight, "bias": offset})

    def split(self, x: str, widths: Mapping[str, int], *, groups: int = 1) -> list[str]:
        """Split a fused projection x into parts, and return their names.

        Args:
            x: `groups` runs of columns, each of which has all parts one after another.
            widths: columns of each part in a run, by the name of its node.
        """
        of, start, parts = sum(widths.values()), 0, []
        if self.width(x) != groups * of:
            raise GraphError(f"{x} has {self.width(x)} columns, not {groups} x {of}")
        for name, width in widths.items():
            parts.append(
                self.apply(
                    "columns", name, {"x": x}, groups=groups, of=of, start=start, width=width
                )
            )
            start += width
        return parts

    def width(self, x: str) -> int:
        """Return the number of features of a row."""
        return self._tensors[x].shape[-1]

    def build(self, *outputs: str) -> Graph:
        """Return the finished graph."""
        return Graph(
            tensors=tuple(self._tensors.values()), nodes=tuple(self._nodes), outputs=outputs
        )


def renamed(node: Node, names: Mapping[str, str], *, prefix: str = "") -> Node:
    """Return the node with its tensors renamed by the mapping (others stay) and its own name
    prefixed.
    """
    return replace(
        node,
        name=prefix + node.name,
        inputs=tuple((slot, names.get(tensor, tensor)) for slot, tensor in node.inputs),
        outputs=tuple((slot, names.get(tensor, tensor)) for slot, tensor in node.outputs),
    )
