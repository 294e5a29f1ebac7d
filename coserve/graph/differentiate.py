"""Reverse-mode differentiation of a graph, and the pruning of gradients that nothing asks for
(FlexLLM section 5.2, algorithm 1).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from coserve.errors import GraphError
from coserve.graph.ir import Graph, Node


@dataclass(frozen=True, kw_only=True)
class GradientNode:
    """The reverse of one node."""

    node: Node
    """The forward node."""
    wanted: tuple[str, ...]
    """Input slots whose gradients it gives."""
    substitutes: tuple[tuple[str, str], ...] = ()
    """Pairs of a slot and the tensor that is read in place of the slot's own (packed signs)."""

    def reads(self, wanted: Collection[str] | None = None) -> dict[str, str]:
        """Return, by slot, the forward tensors that the VJP reads for these gradients (default: all
        wanted ones).
        """
        rule = self.node.operator
        slots = rule.reads(self.wanted if wanted is None else wanted, self.node.tensor)
        return {slot: dict(self.substitutes).get(slot, self.node.tensor[slot]) for slot in slots}


@dataclass(frozen=True, kw_only=True)
class BackwardGraph:
    """A graph and the reverse of its nodes, in the order in which they can run."""

    graph: Graph
    """The forward graph."""
    nodes: tuple[GradientNode, ...]
    """Reverses of its nodes, in an order in which they can run."""

    @cached_property
    def gradient_node(self) -> dict[str, GradientNode]:
        """Return the reverse of each node, by the node's name."""
        return {gradient.node.name: gradient for gradient in self.nodes}

    @cached_property
    def activations(self) -> tuple[str, ...]:
        """Return the row tensors that the VJPs read: those that a forward pass has to save."""
        names = {name for gradient in self.nodes for name in gradient.reads().values()}
        return tuple(
            name for name, spec in self.graph.spec.items() if name in names and spec.kind == "row"
        )

    def is_leaf(self, tensor: str) -> bool:
        """Return whether a gradient ends here, in a weight or a parameter, so that nothing else in
        the backward pass waits for it.
        """
        return self.graph.spec[tensor].kind in ("weight", "parameter", "derived")


def differentiate(graph: Graph, of: Collection[str] | None = None) -> BackwardGraph:
    """Return the whole backward graph: the gradients of `of` (default: all outputs) with respect to
    everything that has one.

    Raises:
        GraphError: an operator on the way has no rule.
    """
    # Tensors with a gradient so far. Readers come before producers in this order, so a node's
    # outputs are complete when the node is met.
    reached = set(graph.outputs if of is None else of)
    nodes = []
    for node in reversed(graph.nodes):
        if not reached.intersection(node.output.values()):
            continue
        rule = node.operator
        if missing := [slot for slot in node.input if slot not in rule.needs]:
            raise GraphError(f"operator {rule.name} has no gradient rule for {', '.join(missing)}")
        wanted = tuple(slot for slot in node.input if rule.needs[slot] is not None)
        reached.update(node.input[slot] for slot in wanted)
        nodes.append(GradientNode(node=node, wanted=wanted))
    return BackwardGraph(graph=graph, nodes=tuple(nodes))


def prune(backward: BackwardGraph, keep: Collection[str]) -> BackwardGraph:
    """Drop every gradient that does not lead to one of `keep` (adapter parameters, chosen weights,
    the block's input).

    A gradient is needed if it is asked for, or if the reverse of the node that made the tensor is
    still alive. One sweep in forward order decides that, since it meets a tensor's producer before
    its readers.

    Raises:
        GraphError: the graph does not have one of these tensors.
    """
    if unknown := [name for name in keep if name not in backward.graph.spec]:
        raise GraphError(
            f"asked for gradients of {', '.join(unknown)}, which the graph does not have"
        )
    alive: set[str] = set(keep)
    kept = []
    for gradient in reversed(backward.nodes):
        wanted = tuple(slot for slot in gradient.wanted if gradient.node.input[slot] in alive)
        if wanted:
            alive.update(gradient.node.output.values())
            kept.append(replace(gradient, wanted=wanted))
    return replace(backward, nodes=tuple(reversed(kept)))
