"""The bypasses of one part of a model on the rows of a batch: each after its node, or its last product within the
node's own.

What a bypass adds is most often a product of low rank, narrow B^T. Where all rows have one adapter and nobody wants
that product for itself, the rest of the bypass runs before the node, and the node's product takes narrow and B along:
a backend that can makes both in the same sums, and its result is written once.

Where an adapter has weights of its own for a node, its rows run the node once more with these. Where all rows are its
rows, and it has weights of its own for all nodes that run at once, they run with these alone.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from coserve.graph.execute import run_node
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Context
from coserve.kernels.low_rank import LowRankRows
from coserve.models.base import Part
from coserve.models.bypasses import BypassGroup


class Saver(Protocol):
    """Who keeps what is computed."""

    def keeps(self, name: str) -> bool:
        """Whether anybody keeps rows of a tensor."""
        ...

    def save(self, name: str, value: Tensor, group: BypassGroup | None = None) -> None:
        """Copy the rows of a group, or of the batch, to all who keep them."""
        ...

    def room(self, name: str) -> Tensor | None:
        """Where the batch's rows of a tensor are kept, if that is one place for all."""
        ...


class BypassRuns:
    """See above. within: the nodes whose product takes along what a bypass adds.

    Two products of which the next node makes a gated unit, and whose results are kept, may make it, too: the results
    are then written to where they are kept.
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
    ) -> None:
        """graph, weights: of the part. num_rows: of the batch, or 0 where every bypass runs after its node."""
        self._part, self._weights, self._context, self._saver = part, weights, context, saver
        self._gated_units = graph.gated_units if context.block_rows is None else {}
        self._made: dict[str, Tensor] = {}  # by node, what was made before it was asked for
        self._groups: dict[str, list[BypassGroup]] = {}
        for group in groups:
            for site in group.sites(part):
                self._groups.setdefault(site, []).append(group)
        has_one = len(groups) == 1 and groups[0].has_one_adapter_of(num_rows) and context.block_rows is None
        self.within = {site for site in self._groups if self._is_within(graph.node[site])} if has_one else set[str]()
        self._alone = {site for site in self._groups if self._instead(site)} if has_one else set[str]()
        self._ran_alone = set[str]()  # of these, the nodes that ran with the adapter's weights alone

    @property
    def sites(self) -> Mapping[str, Sequence[BypassGroup]]:
        """Nodes with bypasses, and whose."""
        return self._groups

    def _instead(self, site: str) -> Node | None:
        """Return the node that rows of the first group run in place of a site, if there is one."""
        return self._groups[site][0].site(self._part, site)[0].instead

    def _is_within(self, node: Node) -> bool:
        bypass, _ = self._groups[node.name][0].site(self._part, node.name)
        if bypass.last_low_rank is None or not node.operator.takes_low_rank:
            return False
        return not self._saver.keeps(bypass.base) and not self._saver.keeps(bypass.result)

    def add(self, node: Node, values: MutableMapping[str, Tensor]) -> None:
        """After a node: add what has not been added within it."""
        if node.name not in self.within:
            for group in self._groups.get(node.name, ()):
                self._run(group, node, values)

    @property
    def run_any(self) -> bool:
        """Whether there may be nodes for `run_nodes`."""
        return bool(self.within or self._alone) or any(self._rooms(unit) for unit in self._gated_units.values())

    def run_nodes(self, nodes: Sequence[Node], values: MutableMapping[str, Tensor]) -> bool:
        """Run nodes that run at once with what is added within them, or what is made of them, if there is any such;
        whether it did.
        """
        if (made := self._made.pop(nodes[0].name, None)) is not None:
            values[nodes[0].outputs[0][1]] = made
            return True
        if all(node.name in self._alone for node in nodes):
            for node in nodes:
                self._run_alone(node, values)
                self._ran_alone.add(node.name)
            return True
        unit = self._gated_units.get(nodes[0].name)
        keep = () if unit is None or self._add_afterwards(nodes) else self._rooms(unit)
        if not keep and not any(node.name in self.within for node in nodes):
            return False
        added = [self._low_rank_rows(node, values) for node in nodes]
        weights, runs = self._weights, []
        for node in nodes:
            inputs = {slot: weights[name] if name in weights else values[name] for slot, name in node.inputs}
            runs.append((inputs, node.attribute))
        operator = nodes[0].operator
        if unit is not None and keep:
            made = operator.forward_gated(runs, added, keep, self._context)
            if made is not None:
                self._made[unit.name] = made
                values.update(zip(unit.input.values(), keep, strict=True))
                return True
        found = operator.forward_with_low_rank(runs, added, self._context)
        for node, results in zip(nodes, found, strict=True):
            values.update({name: results[slot] for slot, name in node.outputs})
        return True

    def _run_alone(self, node: Node, values: MutableMapping[str, Tensor]) -> None:
        """Run a node with the weights of the adapter that all rows have."""
        [group] = self._groups[node.name]
        bypass, parameters = group.site(self._part, node.name)
        assert bypass.instead is not None
        values[node.outputs[0][1]] = self._with_own_weights(group, bypass.instead, parameters, values)

    def _with_own_weights(
        self, group: BypassGroup, instead: Node, parameters: Mapping[str, Any], values: Mapping[str, Tensor]
    ) -> Tensor:
        """Return what a group's rows get of a node whose weights the adapter has."""
        local = dict[str, Tensor]()
        of_site = {name: self._weights[name] for name in instead.input.values() if name in self._weights}
        weights = {**parameters, **of_site}
        self._take_inputs(group, instead, local, weights, values)
        return run_node(instead, local, weights, self._context)[instead.outputs[0][1]]

    def _add_afterwards(self, nodes: Sequence[Node]) -> bool:
        """Whether anything is added to nodes that is not within them."""
        return any(node.name in self._groups and node.name not in self.within for node in nodes)

    def _rooms(self, unit: Node) -> Sequence[Tensor]:
        """Where what a gated unit reads is kept; nothing unless all of it is kept in one place."""
        rooms = [room for name in unit.input.values() if (room := self._saver.room(name)) is not None]
        return rooms if len(rooms) == len(unit.input) else ()

    def _low_rank_rows(self, node: Node, values: Mapping[str, Tensor]) -> LowRankRows | None:
        """What a node's product takes along, after all of the bypass before that has run."""
        if node.name not in self.within:
            return None
        [group] = self._groups[node.name]
        bypass, parameters = group.site(self._part, node.name)
        *inside, last = bypass.nodes
        local = dict[str, Tensor]()
        self._run_inside(group, inside, local, parameters, values)
        self._take_inputs(group, last, local, parameters, values)
        return LowRankRows(narrow=local[last.input["x"]], b=parameters[last.input["weight"]])

    def _run(self, group: BypassGroup, node: Node, values: Mapping[str, Tensor]) -> None:
        """Run the bypasses of a group's adapters on their rows, save what is kept of their inside, add their result in
        place.
        """
        bypass, parameters = group.site(self._part, node.name)
        if bypass.weights:
            parameters = {**parameters, **{name: self._weights[name] for name in bypass.weights}}
        output = values[node.outputs[0][1]]
        base = group.take(output)
        if bypass.instead is not None and node.name not in self._ran_alone:
            own = self._with_own_weights(group, bypass.instead, parameters, values)
            base.copy_(own)
            group.put(output, base)
        if not bypass.nodes:
            return
        local: dict[str, Tensor] = {bypass.base: base}
        if self._saver.keeps(bypass.base):
            self._saver.save(bypass.base, base, group)
        # The last node's result goes right into the sum, unless somebody wants it for itself, or it reads the base.
        last = bypass.nodes[-1]
        is_sum = last.outputs[0][1] == bypass.result and not self._saver.keeps(bypass.result)
        is_sum &= bypass.base not in last.input.values() and self._context.block_rows is None
        self._run_inside(group, bypass.nodes[:-1] if is_sum else bypass.nodes, local, parameters, values)
        if not is_sum:
            group.add(output, local[bypass.result])
            return
        self._take_inputs(group, last, local, parameters, values)
        inputs = {slot: parameters.get(name, local.get(name)) for slot, name in last.inputs}
        last.operator.forward_onto(base, inputs, last.attribute, self._context)
        group.put(output, base)

    def _run_inside(
        self,
        group: BypassGroup,
        nodes: Sequence[Node],
        local: dict[str, Tensor],
        parameters: Mapping[str, Any],
        values: Mapping[str, Tensor],
    ) -> None:
        """Nodes of a bypass, on `local`; what is kept of them is saved."""
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
        """Bring to `local` what a node of a bypass reads of the batch, or of the constants of its rows."""
        for name in node.input.values():
            if name not in local and name not in parameters:
                local[name] = group.take(values[name]) if name in values else group.constant(self._part, name)
