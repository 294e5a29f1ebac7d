"""Placements: the state of every tensor of a graph on the ranks of a group, and the graph that a
rank runs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from coserve.graph.ir import Graph, Node
from coserve.graph.layouts import WHOLE, AnyState
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut

# Suffixes of the names of tensors that collectives make.
_SUFFIX = {
    "rank_sum": "ranks",
    "rank_gather": "gather",
    "rank_copy": "copy",
    "rank_take": "take",
    "rank_first": "first",
}


class Conversion(NamedTuple):
    """A collective that brings a tensor from one state to another."""

    op: str
    """The collective's operator."""
    tensor: str
    """The tensor."""
    before: AnyState
    """State that it reads."""
    after: AnyState
    """State that it gives."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A layout in which ranks run one node of the whole graph."""

    node: Node
    """The node of the whole graph."""
    op: str
    """The operator that they run; the node's, or one with a collective of its own in its place."""
    states: Mapping[str, AnyState]
    """State of every tensor of the node, by slot."""
    conversions: tuple[Conversion, ...]
    """Collectives before the node."""
    is_whole: bool
    """Whether all ranks run it on whole tensors with whole gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalGraph:
    """The graph that one rank runs."""

    graph: Graph
    """The rank's graph."""
    states: Mapping[str, AnyState]
    """State of every tensor, by its name in the graph; constants are whole."""
    summed: tuple[str, ...]
    """Weights and parameters of whose gradient each rank has a part, in alphabetical order, so that
    collectives over them meet. The parts are added up once per optimizer step, entry by entry, over
    the ranks that hold the entry: several ranks for some entries of a fused projection, and one for
    others.
    """

    @cached_property
    def collectives(self) -> tuple[Node, ...]:
        """Return the nodes that move data between ranks, forward or backward."""
        return tuple(
            node for node in self.graph.nodes if node.operator.moves or node.operator.moves_gradient
        )


@dataclass(frozen=True, kw_only=True)
class GraphPlacement:
    """The state of every tensor of a graph on the ranks of a group, and the collectives between
    them.
    """

    graph: Graph
    """The whole graph."""
    size: int
    """Number of ranks."""
    decisions: tuple[Decision, ...]
    """Layouts of the nodes, in order."""
    last: tuple[Conversion, ...]
    """Collectives after the last node."""
    outputs: tuple[tuple[str, AnyState], ...]
    """The graph's outputs, and the states in which they leave it."""
    start: Mapping[str, Collection[AnyState]] = field(default_factory=dict)
    """Tensors that are available from the start in other states than whole."""

    @cached_property
    def _names(self) -> dict[tuple[str, AnyState], str]:
        """Return the name of each tensor in each state in which it is available."""
        found: dict[tuple[str, AnyState], str] = {}
        for tensor in self.graph.tensors:
            states = (
                self.start.get(tensor.name, ()) if tensor.name not in self.graph.producer else ()
            )
            found |= {(tensor.name, state): tensor.name for state in states or (WHOLE,)}
        for decision in self.decisions:
            for slot, name in (*decision.node.inputs, *decision.node.outputs):
                # What a node itself makes keeps its name; only results of collectives get another.
                found.setdefault((name, decision.states[slot]), name)
        for each in self.conversions:
            # Last, since inputs of nodes were noted above by the name that conversions now replace.
            found[each.tensor, each.after] = f"{each.tensor}.{_SUFFIX[each.op]}"
        return found

    @property
    def conversions(self) -> Iterator[Conversion]:
        """Return all collectives that stand between nodes, in order."""
        for decision in self.decisions:
            yield from decision.conversions
        yield from self.last

    def local(self, rank: int) -> LocalGraph:
        """Return the graph of a rank."""
        tensors = dict[str, TensorSpec]()
        states, nodes, summed = dict[str, AnyState](), list[Node](), set[str]()

        def declare(name: str, state: AnyState) -> str:
            local = self._names[name, state]
            tensors[local], states[local] = (
                replace(local_spec(self.graph.spec[name], state), name=local),
                state,
            )
            return local

        def convert(each: Conversion) -> None:
            attributes: list[tuple[str, Any]] = [("tensor", each.tensor)]
            # A gather undoes the cut that it reads, a take makes the one that it gives.
            cut = each.before if each.op == "rank_gather" else each.after
            if isinstance(cut, Cut):
                attributes.insert(0, ("cut", cut))
            x, y = declare(each.tensor, each.before), declare(each.tensor, each.after)
            nodes.append(
                Node(
                    name=y,
                    op=each.op,
                    inputs=(("x", x),),
                    outputs=(("y", y),),
                    attributes=tuple(attributes),
                )
            )

        for decision in self.decisions:
            for conversion in decision.conversions:
                convert(conversion)
            node, of = decision.node, decision.states
            attributes = node.operator.localized(node.attribute, of, rank)
            inputs = tuple((slot, declare(name, of[slot])) for slot, name in node.inputs)
            outputs = tuple((slot, declare(name, of[slot])) for slot, name in node.outputs)
            for slot, name in node.inputs:
                # A gradient that each rank has a part of; `LocalGraph.summed` says when these are
                # added up.
                if self.graph.spec[name].kind in ("weight", "parameter") and _is_summed(
                    of[slot], decision
                ):
                    summed.add(name)
            nodes.append(
                Node(
                    name=node.name,
                    op=decision.op,
                    inputs=inputs,
                    outputs=outputs,
                    attributes=tuple(sorted(attributes.items())),
                )
            )
        for conversion in self.last:
            convert(conversion)
        outputs_ = tuple(self._names[output] for output in self.outputs)
        graph = Graph(tensors=tuple(tensors.values()), nodes=tuple(nodes), outputs=outputs_)
        return LocalGraph(graph=graph, states=states, summed=tuple(sorted(summed)))


def local_spec(spec: TensorSpec, state: AnyState) -> TensorSpec:
    """Return the description of a rank's tensor."""
    return replace(spec, shape=state.local_shape(spec.shape)) if isinstance(state, Cut) else spec


def _is_summed(state: AnyState, decision: Decision) -> bool:
    # Ranks that hold the same entry each have the gradient of their own use of it.
    if isinstance(state, Cut):
        return not state.is_disjoint
    return state is WHOLE and not decision.is_whole
