"""Execution of the bypasses of one part of a model on the rows of a batch: each after its node, or
its last product within the node's own.

A bypass mostly adds a product of low rank, narrow B^T. Where all rows have one adapter, the product
itself is not saved, and the backend has a kernel for both (`graph.fuse`), the rest of the bypass
runs before the node, and the node's product includes narrow and B: both are accumulated in the same
sums, and the result is written once.

Where an adapter has weights of its own for a node, its rows run the node once more with these.
Where all rows are its rows, and it has weights of its own for all nodes that run at once, only
these run.
"""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from coserve.graph.bypass import AttachedBypass
from coserve.graph.execute import add_result, run_node
from coserve.graph.fuse import fuse, room_name
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Context
from coserve.graph.tensors import Kind, TensorSpec
from coserve.models.base import Part
from coserve.models.bypasses import BypassGroup

# Most graphs that are remembered for a part: what is kept of it, and the adapters of its rows, are
# seldom others.
_MAX_REWRITTEN = 64


class Saver(Protocol):
    """A destination of saved activations."""

    @property
    def names(self) -> Collection[str]:
        """Return the tensors of which rows are saved."""
        ...

    def keeps(self, name: str) -> bool:
        """Return whether rows of a tensor are saved."""
        ...

    def save(self, name: str, value: Tensor, group: BypassGroup | None = None) -> None:
        """Copy the rows of a group, or of the batch, to their destinations."""
        ...

    def room(self, name: str) -> Tensor | None:
        """Return the destination of a tensor's rows, if it is one place for the whole batch."""
        ...


class BypassRuns:
    """The bypasses of a part's nodes on the rows of a batch (see the module).

    `graph` is the part's graph with bypasses fused in, and `within` its nodes whose product
    includes that of a bypass. Two products that the next node turns into a gated unit, and whose
    results are saved, may compute the unit, too: the results are then written to their
    destinations.
    """

    def __init__(
        self,
        part: Part,
        graph: Graph,
        groups: Sequence[BypassGroup],
        num_rows: int,
        weights: Mapping[str, Any],
        context: Context,
        saver: Saver,
        read: Collection[str] = (),
    ) -> None:
        """Prepare a part.

        Args:
            graph: Graph of the part.
            weights: Weights of the part.
            num_rows: Number of rows in the batch, or 0 where every bypass runs after its node.
            read: Tensors that others read.
        """
        self._part, self._context, self._saver = part, context, saver
        self._groups: dict[str, list[BypassGroup]] = {}
        for group in groups:
            for site in group.sites(part):
                self._groups.setdefault(site, []).append(group)
        # Only then may a node's own product include the bypass, or the adapter's weights replace
        # it.
        has_one = len(groups) == 1 and groups[0].has_one_adapter_of(num_rows)
        operators = (
            frozenset(context.backend.fused) if context.block_rows is None else frozenset[str]()
        )
        may_be_within = has_one and "linear_and_low_rank" in operators
        self.within = (
            {site for site in self._groups if self._is_within(graph.node[site])}
            if may_be_within
            else set()
        )
        # Sites whose rows all run the adapter's own weights: the backbone's product would be
        # wasted.
        self._alone = (
            {site for site in self._groups if self._instead(site)} if has_one else set[str]()
        )
        # Nodes among these that have run with the adapter's weights alone.
        self._ran_alone = set[str]()
        self.graph, self.weights, self._given = graph, weights, list[str]()
        if operators:
            self._fuse(groups, operators, read)

    def _fuse(
        self, groups: Sequence[BypassGroup], operators: frozenset[str], read: Collection[str]
    ) -> None:
        graph, saver, bypasses = self.graph, self._saver, dict[str, AttachedBypass]()
        # The fused graph reads the bypass's parameters as weights of its own.
        if self.within:
            weights = dict(self.weights)
            for site in sorted(self.within):
                bypasses[site], parameters = groups[0].site(self._part, site)
                weights |= parameters
            self.weights = weights
        # Bypasses that run after their node add to these outputs in place: no node may absorb them.
        added_to = {
            graph.node[site].outputs[0][1] for site in self._groups if site not in self.within
        }
        names = saver.names
        kept = frozenset((*read, *added_to, *names))
        # Saved tensors that a kernel may write to their destination; not those that change
        # afterwards.
        rooms = frozenset(
            name for name in names if name not in added_to and saver.room(name) is not None
        )
        key = (
            tuple((site, id(bypass)) for site, bypass in bypasses.items()),
            operators,
            kept,
            rooms,
        )
        made, its_bypasses = graph.rewritten.get(key, (None, {}))
        # Bypasses take long to compare. Those of one adapter are the same objects in every step; a
        # copy of the graph may have others by the same numbers.
        if made is None or any(
            its_bypasses[site] is not bypass for site, bypass in bypasses.items()
        ):
            # All at once: which of them are still in use is not known.
            if len(graph.rewritten) >= _MAX_REWRITTEN:
                graph.rewritten.clear()
            made = fuse(_with_bypasses(graph, bypasses, self.weights), operators, kept, rooms)
            graph.rewritten[key] = made, bypasses
        self.graph = made
        self._given = [
            spec.name for spec in self.graph.with_kind("constant") if spec.name not in graph.spec
        ]
        self._one = groups[0] if groups else None

    @property
    def sites(self) -> Mapping[str, Sequence[BypassGroup]]:
        """Return the nodes with bypasses, and the groups that have them."""
        return self._groups

    def _instead(self, site: str) -> Node | None:
        """Return the node that rows of the first group run in place of a site, if there is one."""
        return self._groups[site][0].site(self._part, site)[0].instead

    def _is_within(self, node: Node) -> bool:
        bypass, _ = self._groups[node.name][0].site(self._part, node.name)
        if bypass.last_low_rank is None or node.op != "linear":
            return False
        return not self._saver.keeps(bypass.base) and not self._saver.keeps(bypass.result)

    def add(self, node: Node, values: MutableMapping[str, Tensor]) -> None:
        """Add what bypasses contribute to a node's output and the node has not included."""
        if node.name not in self.within:
            # Groups in turn, since they are rows of different adapters.
            for group in self._groups.get(node.name, ()):
                self._run(group, node, values)

    @property
    def run_any(self) -> bool:
        """Return whether there may be nodes for `run_nodes`."""
        return bool(self._alone)

    def constants(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the fused graph reads beside the part's inputs: constants of bypasses, and
        destinations of saved rows.
        """
        rooms = {room_name(name): name for name in self._saver.names}
        found = dict[str, Tensor]()
        for name in self._given:
            # A destination, which the kernel writes to; anything else is a constant of the bypass's
            # rows.
            if name in rooms and (room := self._saver.room(rooms[name])) is not None:
                found[name] = room
            elif name not in values:
                assert self._one is not None, "a constant of a bypass"
                found[name] = self._one.constant(self._part, name)
        return found

    def run_nodes(self, nodes: Sequence[Node], values: MutableMapping[str, Tensor]) -> bool:
        """Run nodes that run at once with the weights of the adapter that all rows have. Returns
        False if it has none of its own.
        """
        if all(node.name in self._alone for node in nodes):
            for node in nodes:
                self._run_alone(node, values)
                self._ran_alone.add(node.name)
            return True
        return False

    def _run_alone(self, node: Node, values: MutableMapping[str, Tensor]) -> None:
        """Run a node with the weights of the adapter that all rows have."""
        [group] = self._groups[node.name]
        bypass, parameters = group.site(self._part, node.name)
        assert bypass.instead is not None
        values[node.outputs[0][1]] = self._with_own_weights(
            group, bypass.instead, parameters, values
        )

    def _with_own_weights(
        self,
        group: BypassGroup,
        instead: Node,
        parameters: Mapping[str, Any],
        values: Mapping[str, Tensor],
    ) -> Tensor:
        """Return a node's output for a group's rows by the adapter's own weights."""
        local = dict[str, Tensor]()
        of_site = {
            name: self.weights[name] for name in instead.input.values() if name in self.weights
        }
        weights = {**parameters, **of_site}
        self._take_inputs(group, instead, local, weights, values)
        return run_node(instead, local, weights, self._context)[instead.outputs[0][1]]

    def _run(self, group: BypassGroup, node: Node, values: Mapping[str, Tensor]) -> None:
        """Run the bypasses of a group's adapters on their rows, save what is kept within them, and
        add their result in place.
        """
        bypass, parameters = group.site(self._part, node.name)
        if bypass.weights:
            parameters = {**parameters, **{name: self.weights[name] for name in bypass.weights}}
        output = values[node.outputs[0][1]]
        # A view of neighbouring rows, else a copy, which `put` writes back.
        base = group.take(output)
        # These rows' result by the backbone's weights is replaced.
        if bypass.instead is not None and node.name not in self._ran_alone:
            own = self._with_own_weights(group, bypass.instead, parameters, values)
            base.copy_(own)
            group.put(output, base)
        if not bypass.nodes:
            return
        local: dict[str, Tensor] = {bypass.base: base}
        if self._saver.keeps(bypass.base):
            self._saver.save(bypass.base, base, group)
        # The last node's result goes right into the sum, unless somebody wants it for itself, or it
        # reads the base.
        last = bypass.nodes[-1]
        is_sum = last.outputs[0][1] == bypass.result and not self._saver.keeps(bypass.result)
        is_sum &= bypass.base not in last.input.values() and self._context.block_rows is None
        self._run_inside(
            group, bypass.nodes[:-1] if is_sum else bypass.nodes, local, parameters, values
        )
        if not is_sum:
            group.add(output, local[bypass.result])
            return
        self._take_inputs(group, last, local, parameters, values)
        inputs = {slot: parameters.get(name, local.get(name)) for slot, name in last.inputs}
        add_result(last, base, inputs, self._context)
        # Nothing to do for a view: the sum is in place.
        group.put(output, base)

    def _run_inside(
        self,
        group: BypassGroup,
        nodes: Sequence[Node],
        local: dict[str, Tensor],
        parameters: Mapping[str, Any],
        values: Mapping[str, Tensor],
    ) -> None:
        """Run nodes of a bypass on `local`, and save what is kept of them."""
        for inner in nodes:
            self._take_inputs(group, inner, local, parameters, values)
            made = run_node(inner, local, parameters, self._context)
            local.update(made)
            for name, value in made.items():
                if self._saver.keeps(name):
                    self._saver.save(name, value, group)

    def _take_inputs(
        self,
        group: BypassGroup,
        node: Node,
        local: dict[str, Tensor],
        parameters: Mapping[str, Any],
        values: Mapping[str, Tensor],
    ) -> None:
        """Copy to `local` what a node of a bypass reads of the batch, or of the constants of its
        rows.
        """
        for name in node.input.values():
            if name not in local and name not in parameters:
                local[name] = (
                    group.take(values[name]) if name in values else group.constant(self._part, name)
                )


def _with_bypasses(
    graph: Graph, bypasses: Mapping[str, AttachedBypass], weights: Mapping[str, Any]
) -> Graph:
    """Return a graph with bypasses of low rank as nodes; for nodes that run at once, everything
    before their last products comes before all of them.
    """
    if not bypasses:
        return graph
    tensors, nodes = dict(graph.spec), list[Node]()
    for run in graph.runs:
        for node in run:
            if (bypass := bypasses.get(node.name)) is not None:
                # Before all nodes of the run, so that these stay neighbours and can still run at
                # once.
                nodes += bypass.nodes[:-1]
        for node in run:
            if (bypass := bypasses.get(node.name)) is None:
                nodes.append(node)
                continue
            [(slot, output)] = node.outputs
            nodes.append(replace(node, name=bypass.base, outputs=((slot, bypass.base),)))
            nodes.append(bypass.nodes[-1])
            both = (("a", bypass.base), ("b", bypass.result))
            nodes.append(Node(name=node.name, op="add", inputs=both, outputs=node.outputs))
            tensors[bypass.base] = replace(graph.spec[output], name=bypass.base)
    made = {name for node in nodes for name in node.output.values()}
    for name in (name for node in nodes for name in node.tensor.values()):
        kind: Kind = "row" if name in made else "parameter" if name in weights else "constant"
        tensors.setdefault(name, TensorSpec(name=name, shape=(), kind=kind))
    return Graph(tensors=tuple(tensors.values()), nodes=tuple(nodes), outputs=graph.outputs)
