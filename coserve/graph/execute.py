"""Runs graphs and programs on tensors. It knows no operator: it looks up, calls, and lets go of what nobody reads any
more.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from coserve.graph.blocks import in_blocks
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Context, Values
from coserve.graph.program import Program


def run_node(node: Node, values: Values, weights: Values, context: Context) -> dict[str, Tensor]:
    """Run one node on tensors by name; returns its outputs by name."""
    return run_nodes((node,), values, weights, context)


def run_nodes(nodes: Sequence[Node], values: Values, weights: Values, context: Context) -> dict[str, Tensor]:
    """The same for several that may run at once (`Graph.runs`); in blocks of rows, if the context asks for that."""
    first, attributes = nodes[0].operator, [node.attribute for node in nodes]

    def run(inputs: Sequence[Values]) -> list[dict[str, Tensor]]:
        if len(nodes) == 1:
            return [first.forward(inputs[0], attributes[0], context)]
        return first.forward_all(list(zip(inputs, attributes, strict=True)), context)

    inputs = [_inputs(node, values, weights) for node in nodes]
    if context.block_rows is None or first.whole:
        found = run(inputs)
    else:
        row_slots = [[slot for slot, name in node.inputs if name not in weights] for node in nodes]
        found = in_blocks(run, inputs, row_slots, context.block_rows)
    return {name: results[slot] for node, results in zip(nodes, found, strict=True) for slot, name in node.outputs}


def _inputs(node: Node, values: Values, weights: Values) -> dict[str, Any]:
    return {slot: weights[name] if name in weights else values[name] for slot, name in node.inputs}


def run_graph(
    graph: Graph,
    values: MutableMapping[str, Tensor],
    weights: Values,
    context: Context,
    after: Callable[[Node, MutableMapping[str, Tensor]], None] | None = None,
) -> None:
    """Run every node, in place on `values`, which holds the inputs and, at the end, the outputs.

    weights: backbone weights (and parameters, where the graph has any) by name. after: called after each node, to let
    bypasses add to its output and to save tensors, before anything is let go.
    """
    for run in graph.runs:
        values.update(run_nodes(run, values, weights, context))
        for node in run:
            if after is not None:
                after(node, values)
            for name in graph.frees[node.name]:
                values.pop(name, None)


class BackwardRun:
    """One program run backward over one window of rows; it can stop between any two instructions and resume later.

    Args:
        values: by tensor name, the window's rows of the saved tensors and constants, and the whole weights and
        parameters.
        gradients: gradients of the graph's outputs, by name, for the window's rows.
        accumulators: for each weight or parameter asked for, the float32 tensor that its gradient is added to.
        context: handed to the operators.
    """

    def __init__(
        self,
        program: Program,
        *,
        values: Values,
        gradients: Mapping[str, Tensor],
        accumulators: Mapping[str, Tensor],
        context: Context,
    ) -> None:
        self._program, self._context, self._accumulators = program, context, accumulators
        self._values: dict[str, Tensor] = {}
        self._given = values
        self._gradients = dict(gradients)
        # Gradients that are this run's own; others may be somebody else's tensors, or two names for one.
        self._sums: set[str] = set()
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._program.backward)

    @property
    def num_instructions_left(self) -> int:
        return len(self._program.backward) - self._next

    @property
    def num_transient_bytes(self) -> int:
        """Bytes of gradients, and of tensors that were restored or computed again, held between two instructions."""
        tensors = {tensor.untyped_storage() for tensor in (*self._values.values(), *self._gradients.values())}
        return sum(storage.nbytes() for storage in tensors)

    def advance(self, max_instructions: int | None = None) -> bool:
        """Run the next instructions (default: all that are left). Returns whether the run is done."""
        left = (
            self.num_instructions_left
            if max_instructions is None
            else min(max_instructions, self.num_instructions_left)
        )
        for _ in range(left):
            self._step()
        return self.done

    def gradient(self, tensor: str) -> Tensor:
        """The finished gradient of a row tensor that was asked for."""
        assert self.done
        return self._gradients[tensor]

    def _step(self) -> None:
        step = self._program.backward[self._next]
        node, rule = step.node, step.node.operator
        inputs = {slot: self._values[name] if name in self._values else self._given[name] for slot, name in step.reads}
        if step.kind == "recompute":
            results = rule.forward(inputs, node.attribute, self._context)
            self._values.update({name: results[slot] for slot, name in node.outputs})
        else:
            gradients = {slot: self._gradients[name] for slot, name in node.outputs if name in self._gradients}
            added = [slot for slot in step.wanted if slot in rule.sums and node.input[slot] in self._gradients]
            for slot in added:
                total = self._sum(node.input[slot])
                rule.vjp_onto(total, slot, inputs, gradients, node.attribute, self._context)
            wanted = [slot for slot in step.wanted if slot not in added]
            results = rule.vjp(wanted, inputs, gradients, node.attribute, self._context) if wanted else {}
            for slot, value in results.items():
                if slot in node.output:
                    self._values[node.output[slot]] = value
                else:
                    self._accumulate(node.input[slot], value, is_new=slot in rule.sums)
        for name in step.frees:
            self._values.pop(name, None)
        for name in step.frees_gradients:
            self._gradients.pop(name, None)
        self._next += 1

    def _accumulate(self, tensor: str, gradient: Tensor, *, is_new: bool) -> None:
        """is_new: whether nobody else has this gradient."""
        if tensor in self._accumulators:
            self._accumulators[tensor].add_(gradient)
        elif tensor in self._gradients:
            self._gradients[tensor] = self._gradients[tensor] + gradient
            self._sums.add(tensor)
        else:
            self._gradients[tensor] = gradient
            if is_new:
                self._sums.add(tensor)

    def _sum(self, tensor: str) -> Tensor:
        """The gradient so far, to be added to in place."""
        if tensor not in self._sums:
            self._gradients[tensor] = self._gradients[tensor].clone()
            self._sums.add(tensor)
        return self._gradients[tensor]
