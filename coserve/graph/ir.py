"""The graph: named tensors, and nodes that apply an operator to them, in an order that can be run.

Graphs are immutable and hashable, so equal blocks share one compiled program.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from coserve.errors import GraphError
from coserve.graph.operators import operator
from coserve.graph.operators.base import Cost, Load, Operator
from coserve.graph.tensors import Kind, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Node:
    """One application of an operator; `inputs` and `outputs` pair the operator's slots with tensor
    names.
    """

    name: str
    op: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def operator(self) -> Operator:
        return operator(self.op)

    @cached_property
    def input(self) -> dict[str, str]:
        """Slot -> tensor name."""
        return dict(self.inputs)

    @cached_property
    def output(self) -> dict[str, str]:
        """Slot -> tensor name."""
        return dict(self.outputs)

    @cached_property
    def tensor(self) -> dict[str, str]:
        """Slot -> tensor name, of inputs and outputs together."""
        return self.input | self.output

    @cached_property
    def attribute(self) -> dict[str, Any]:
        return dict(self.attributes)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in execution order over declared tensors. Checked when created: names are unique,
    inputs exist before they are read.
    """

    tensors: tuple[TensorSpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.spec) != len(self.tensors) or len({node.name for node in self.nodes}) != len(
            self.nodes
        ):
            raise GraphError("a graph names two tensors or two nodes alike")
        made = {name for node in self.nodes for name in node.output.values()}
        known = {name for name in self.spec if name not in made}
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
        """Every tensor by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def node(self) -> dict[str, Node]:
        """Every node by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """Tensor name -> the node that makes it; graph inputs are absent."""
        return {name: node for node in self.nodes for name in node.output.values()}

    @cached_property
    def kv_tensors(self) -> tuple[str, ...]:
        """Row tensors that some operator reads beyond the window it runs on (K and V): later
        windows need them kept.
        """
        names = (node.input[slot] for node in self.nodes for slot in node.operator.whole)
        return tuple(dict.fromkeys(names))

    @cached_property
    def lead_tensors(self) -> tuple[str, ...]:
        """Row tensors of which a VJP reads rows before its window: of these, what is saved of all
        rows is read.
        """
        names = (node.input[slot] for node in self.nodes for slot in node.operator.lead)
        return tuple(dict.fromkeys(names))

    @cached_property
    def state_size(self) -> int:
        """Elements (float32) of what a sequence carries from row to row; one operator at most has
        such a state.
        """
        sizes = [size for node in self.nodes if (size := node.operator.state_size(node.attribute))]
        assert len(sizes) <= 1, "a block carries one state"
        return sum(sizes)

    @cached_property
    def runs(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes in order; neighbours of one operator that may run at once (see
        `Operator.shared`) together.
        """
        runs: list[list[Node]] = []
        for node in self.nodes:
            slot = node.operator.shared
            if (
                slot
                and runs
                and runs[-1][0].op == node.op
                and runs[-1][0].input[slot] == node.input[slot]
            ):
                runs[-1].append(node)
            else:
                runs.append([node])
        return tuple(map(tuple, runs))

    @cached_property
    def rewritten(self) -> dict[Hashable, Any]:
        """What this graph was rewritten to, by what it was rewritten for: a memory of those who do
        it every step.
        """
        return {}

    @cached_property
    def frees(self) -> dict[str, tuple[str, ...]]:
        """Node -> the row tensors that it is the last one to read (or makes for nobody): a forward
        pass lets them go there.
        """
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
        """The tensors of a node by slot."""
        return {slot: self.spec[name] for slot, name in node.tensor.items()}

    def node_cost(self, node: Node, load: Load) -> Cost:
        """Cost of one forward execution of a node."""
        return node.operator.cost(self.slot_specs(node), node.attribute, load)

    def cost(self, load: Load) -> Cost:
        """Cost of all nodes."""
        return sum((self.node_cost(node, load) for node in self.nodes), Cost())


class GraphBuilder:
    """Writes a graph down, one node at a time; a node with one output names that tensor after
    itself.
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
        """Declare a tensor of this whole shape that follows from an adapter's parameters and the
        backbone's weights.
        """
        return self._declare(TensorSpec(name=name, shape=shape, kind="derived"))

    def _declare(self, tensor: TensorSpec) -> str:
        if tensor.name in self._tensors:
            raise GraphError(f"tensor {tensor.name} is declared twice")
        self._tensors[tensor.name] = tensor
        return tensor.name

    def apply(self, op: str, name: str, inputs: Mapping[str, str | None], **attributes: Any) -> str:
        """Add a node; inputs pairs slots with tensor names (None: the optional slot stays empty).
        Returns the first output's name.
        """
        rule = operator(op)
        given = {slot: tensor for slot, tensor in inputs.items() if tensor is not None}
        unknown, missing = (
            set(given) - set(rule.inputs),
            set(rule.inputs) - set(given) - rule.optional,
        )
        if unknown or missing:
            raise GraphError(
                f"{op} takes {', '.join(rule.inputs)}; node {name} was given {', '.join(given)}"
            )
        specs = {slot: self._tensors[tensor] for slot, tensor in given.items()}
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
                inputs=tuple(given.items()),
                outputs=tuple(outputs.items()),
                attributes=tuple(sorted(attributes.items())),
            )
        )
        return outputs[rule.outputs[0]]

    def linear(self, name: str, x: str, out_features: int, *, bias: bool = False) -> str:
        """y = x W^T (+ b), with weights `name.weight` [out, in] and `name.bias` [out]."""
        weight = self.weight(f"{name}.weight", out_features, self._tensors[x].shape[-1])
        offset = self.weight(f"{name}.bias", out_features) if bias else None
        return self.apply("linear", name, {"x": x, "weight": weight, "bias": offset})

    def split(self, x: str, widths: Mapping[str, int], *, groups: int = 1) -> list[str]:
        """The parts of a fused projection, by the names of their nodes: x is `groups` runs of
        columns, and each run has all parts, one after another, of these widths.
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
        """Features of a row."""
        return self._tensors[x].shape[-1]

    def build(self, *outputs: str) -> Graph:
        """The finished graph."""
        return Graph(
            tensors=tuple(self._tensors.values()), nodes=tuple(self._nodes), outputs=outputs
        )


def renamed(node: Node, names: Mapping[str, str], *, prefix: str = "") -> Node:
    """The node with its tensors renamed by the mapping (others stay) and its own name prefixed."""
    return replace(
        node,
        name=prefix + node.name,
        inputs=tuple((slot, names.get(tensor, tensor)) for slot, tensor in node.inputs),
        outputs=tuple((slot, names.get(tensor, tensor)) for slot, tensor in node.outputs),
    )
