"""Runs graphs and programs on tensors. The walker knows no operator: it looks tensors up, calls,
and drops what nothing reads any more.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coserve.graph.blocks import in_blocks
from coserve.graph.fusions import FORWARD_SUMS, GRADIENT_SUMS, SIBLING_FUSIONS
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Context, Values
from coserve.graph.program import Instruction, Program
from coserve.kernels.base import Factor, Grouped, JoinedRows, rows_of_owner
from coserve.kernels.low_rank import AdapterRows


def run_node(node: Node, values: Values, weights: Values, context: Context) -> dict[str, Tensor]:
    """Run one node on tensors by name; return its outputs by name."""
    return run_nodes((node,), values, weights, context)


def run_nodes(
    nodes: Sequence[Node], values: Values, weights: Values, context: Context
) -> dict[str, Tensor]:
    """Run nodes that may run at once (`Graph.runs`), in blocks of rows if the context asks for
    that; return their outputs by name.
    """
    first = nodes[0]

    def run(inputs: Sequence[Values]) -> Sequence[dict[str, Tensor]]:
        if len(nodes) == 1:
            return [first.operator.forward(inputs[0], first.attribute, context)]
        return SIBLING_FUSIONS[first.op].run(inputs, context)

    inputs = [_inputs(node, values, weights) for node in nodes]
    # Attention takes all rows at once: which rows are whose is in the context, for the batch.
    if context.block_rows is None or first.operator.whole:
        results_of_nodes = run(inputs)
    else:
        # Only tensors with rows are cut into blocks; every block reads the weights whole.
        row_slots = [[slot for slot, name in node.inputs if name not in weights] for node in nodes]
        results_of_nodes = in_blocks(run, inputs, row_slots, context.block_rows)
    return {
        name: results[slot]
        for node, results in zip(nodes, results_of_nodes, strict=True)
        for slot, name in node.outputs
    }


def add_result(node: Node, total: Tensor, inputs: Values, context: Context) -> None:
    """Run a node with one output and add its result to rows of that shape, in place.

    Args:
        inputs: by slot; none of them is `total`.
    """
    if (add := FORWARD_SUMS.get(node.op)) is not None:
        add(total, inputs, node.attribute, context)
        return
    (result,) = node.operator.forward(inputs, node.attribute, context).values()
    total += result


def _inputs(node: Node, values: Values, weights: Values) -> dict[str, Any]:
    return {slot: weights[name] if name in weights else values[name] for slot, name in node.inputs}


def run_graph(
    graph: Graph,
    values: MutableMapping[str, Tensor],
    weights: Values,
    context: Context,
    after: Callable[[Node, MutableMapping[str, Tensor]], None] | None = None,
    instead: Callable[[Sequence[Node], MutableMapping[str, Tensor]], bool] | None = None,
) -> None:
    """Run every node, in place on `values`, which holds the inputs and, at the end, the outputs.

    Args:
        weights: backbone weights (and parameters, where the graph has any) by name.
        after: called after each node, before anything is dropped. It lets bypasses add to the
            node's output and saves tensors.
        instead: called with nodes that run at once (or one node). Returns whether it ran them
            itself, with their bypasses.
    """
    for run in graph.runs:
        if instead is not None and instead(run, values):
            pass
        elif len(run) == 1 and context.block_rows is None:  # most of them: a step has hundreds
            [node] = run
            inputs = {
                slot: weights[name] if name in weights else values[name]
                for slot, name in node.inputs
            }
            results = node.operator.forward(inputs, node.attribute, context)
            for slot, name in node.outputs:
                values[name] = results[slot]
        else:
            values.update(run_nodes(run, values, weights, context))
        for node in run:
            if after is not None:
                after(node, values)
            # `after` comes first: it may read or save what this node was the last reader of.
            for name in graph.frees[node.name]:
                values.pop(name, None)


class BackwardRun:
    """One program run backward over one window of rows, or over windows of several owners that
    stand side by side. It can stop between any two instructions and resume later.

    Args:
        values: by tensor name, the window's rows of the saved tensors and constants, and the whole
            weights and parameters. For several owners: `JoinedRows`, and `Grouped` parameters.
        gradients: gradients of the graph's outputs, by name, for the window's rows.
        accumulators: float32 tensors that the gradient of each weight or parameter asked for is
            added to. For several owners, `Grouped`: each gets what its own rows give.
        context: passed to the operators.
    """

    def __init__(
        self,
        program: Program,
        *,
        values: Values,
        gradients: Mapping[str, Tensor],
        accumulators: Mapping[str, Factor],
        context: Context,
    ) -> None:
        self._program, self._context, self._accumulators = program, context, accumulators
        self._values: dict[str, Tensor] = {}
        self._given = values
        self._gradients = dict(gradients)
        # Gradients that are this run's own; others may be somebody else's tensors, or two names for
        # one.
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
        """Return the bytes that are held between two instructions: gradients, and tensors that were
        restored or recomputed.
        """
        held = (*self._values.values(), *self._gradients.values())
        # By storage: two names may stand for one tensor, or for views of one.
        tensors = {tensor.untyped_storage() for tensor in held}
        return sum(storage.nbytes() for storage in tensors)

    def advance(self, max_instructions: int | None = None) -> bool:
        """Run the next instructions (default: all left); return whether the run is done."""
        left = (
            self.num_instructions_left
            if max_instructions is None
            else min(max_instructions, self.num_instructions_left)
        )
        for _ in range(left):
            self._step()
        return self.done

    def advance_to_product(self, nodes: Collection[str]) -> str | None:
        """Run all instructions before the next product of one of these nodes with a weight of the
        backbone.

        Returns:
            The node whose input gradient that product is; None if the run is done.
        """
        while not self.done:
            step = self._program.backward[self._next]
            if step.node.name in nodes and _is_product(step, self._program.graph):
                return step.node.name
            self._step()
        return None

    def gradient(self, tensor: str) -> Tensor:
        """Return the finished gradient of a row tensor that was asked for."""
        assert self.done
        return self._gradients[tensor]

    def _step(self) -> None:
        step = self._program.backward[self._next]
        self._run(step)
        self._finish(step)

    def _run(self, step: Instruction) -> None:
        owners = self._owners(step.node)
        if step.kind == "recompute":
            self._recompute(step, owners)
        elif owners is None:
            self._reverse(step)
        else:
            self._reverse_each(step, owners)

    def _finish(self, step: Instruction) -> None:
        # Tensors that were given are not in `_values`, so nothing is popped: the caller frees
        # these.
        for name in step.frees:
            self._values.pop(name, None)
        for name in step.frees_gradients:
            self._gradients.pop(name, None)
        self._next += 1

    def _inputs(self, step: Instruction, apart: Collection[str] = ()) -> dict[str, Any]:
        """Return the tensors that an instruction reads by slot, as copies where the operator
        overwrites one that is read later.

        Args:
            apart: slots whose rows need not stand side by side.
        """
        tensors = {slot: self._value(name, apart=slot in apart) for slot, name in step.reads}
        if step.node.operator.overwrites:
            read_later = [slot for slot, name in step.reads if name not in step.frees]
            tensors |= {
                slot: tensors[slot].clone()
                for slot in read_later
                if slot in step.node.operator.overwrites
            }
        return tensors

    def _value(self, name: str, *, apart: bool) -> Any:
        if name in self._values:
            return self._values[name]
        value = self._given[name]
        if isinstance(value, JoinedRows) and not apart:
            # Joined once and kept for later readers; `step.frees` drops the copy like any other
            # tensor.
            value = self._values[name] = torch.cat(value.tensors)
        return value

    def _output_gradients(self, step: Instruction) -> dict[str, Tensor]:
        return {
            slot: self._gradients[name]
            for slot, name in step.node.outputs
            if name in self._gradients
        }

    def _recompute(self, step: Instruction, owners: AdapterRows | None) -> None:
        node, rule, inputs = step.node, step.node.operator, self._inputs(step)
        if owners is None:
            results = rule.forward(inputs, node.attribute, self._context)
        else:
            # Parameters of several adapters: each owner's rows run with its own ones.
            each = [
                rule.forward(self._own(step, inputs, index, rows), node.attribute, self._context)
                for index, rows in enumerate(owners.slices)
            ]
            results = {slot: torch.cat([found[slot] for found in each]) for slot in each[0]}
        self._values.update({name: results[slot] for slot, name in node.outputs})

    def _reverse(self, step: Instruction) -> None:
        node, rule = step.node, step.node.operator
        inputs, gradients = self._inputs(step, rule.apart), self._output_gradients(step)
        # A gradient goes right into its sum where there is one, not into a tensor of its own.
        wanted = list[str]()
        for slot in step.wanted:
            add = GRADIENT_SUMS.get((node.op, slot))
            if add is not None and self._has_sum(node.input[slot]):
                total = self._sum(node.input[slot])
                add(total, inputs, gradients, node.attribute, self._context)
            else:
                wanted.append(slot)
        results = (
            rule.vjp(wanted, inputs, gradients, node.attribute, self._context) if wanted else {}
        )
        for slot, value in results.items():
            # A restored tensor of the forward pass, not a gradient.
            if slot in node.output:
                self._values[node.output[slot]] = value
            else:
                # Such a slot's VJP gives a new tensor; others may return the output's gradient
                # itself.
                is_new = (node.op, slot) in GRADIENT_SUMS
                self._accumulate(node.input[slot], value, is_new=is_new)

    # -- several owners -------------------------------------------------------------

    def _owners(self, node: Node) -> AdapterRows | None:
        """Return which rows are whose, if an instruction reads parameters of several adapters or
        gives their gradients, and its operator handles one adapter at a time.
        """
        for slot, name in node.inputs:
            for found in (self._given.get(name), self._accumulators.get(name)):
                if isinstance(found, Grouped) and slot not in node.operator.grouped:
                    return found.rows
        return None

    def _own(self, step: Instruction, values: Values, index: int, rows: slice) -> dict[str, Any]:
        """Return one owner's part of an instruction's tensors by slot: its rows, and its
        parameters.
        """
        spec, tensor, tensors = self._program.graph.spec, step.node.tensor, {}
        for slot, value in values.items():
            if isinstance(value, Grouped):
                tensors[slot] = value.tensors[index]
            else:
                tensors[slot] = (
                    rows_of_owner(value, index, rows) if spec[tensor[slot]].per_row else value
                )
        return tensors

    def _reverse_each(self, step: Instruction, owners: AdapterRows) -> None:
        """Reverse a node that has parameters, for one owner after the other."""
        node, rule = step.node, step.node.operator
        # Rows may lie apart in every slot, since each owner's are read on their own.
        inputs, gradients = self._inputs(step, rule.inputs), self._output_gradients(step)
        # Row gradients that exist already are added to in place, a slice of rows per owner; sums of
        # parameters belong to one owner each and are handled with the results below.
        totals = {
            slot: self._row_sum(node.input[slot])
            for slot in step.wanted
            if (node.op, slot) in GRADIENT_SUMS and node.input[slot] in self._gradients
        }
        wanted = [slot for slot in step.wanted if slot not in totals]
        parts: dict[str, list[Tensor]] = {}
        for index, rows in enumerate(owners.slices):
            own_inputs = self._own(step, inputs, index, rows)
            own_gradients = {slot: gradient[rows] for slot, gradient in gradients.items()}
            for slot, total in totals.items():
                add = GRADIENT_SUMS[node.op, slot]
                add(total[rows], own_inputs, own_gradients, node.attribute, self._context)
            results = (
                rule.vjp(wanted, own_inputs, own_gradients, node.attribute, self._context)
                if wanted
                else {}
            )
            for slot, value in results.items():
                # A restored output has no input slot, hence the default, which no accumulator has
                # as its name.
                accumulator = self._accumulators.get(node.input.get(slot, ""))
                if isinstance(accumulator, Grouped):
                    accumulator.tensors[index].add_(value)
                else:
                    parts.setdefault(slot, []).append(value)
        for slot, values in parts.items():
            # Owners came in the order of their rows, so the parts join to the rows of the window.
            whole = torch.cat(values)
            if slot in node.output:
                self._values[node.output[slot]] = whole
            else:
                self._accumulate(node.input[slot], whole, is_new=True)

    # -- sums -----------------------------------------------------------------------

    def _accumulate(self, tensor: str, gradient: Tensor, *, is_new: bool) -> None:
        """Add a gradient to the accumulator or to the gradient so far.

        Args:
            is_new: whether nothing else holds this tensor, so that it may be added to in place.
        """
        accumulator = self._accumulators.get(tensor)
        if accumulator is not None:
            assert isinstance(accumulator, Tensor), "gradients of several owners are kept apart"
            accumulator.add_(gradient)
        elif tensor in self._gradients:
            # Not in place: the gradient so far may be somebody else's tensor. The sum is this run's
            # own.
            self._gradients[tensor] = self._gradients[tensor] + gradient
            self._sums.add(tensor)
        else:
            self._gradients[tensor] = gradient
            if is_new:
                self._sums.add(tensor)

    def _has_sum(self, tensor: str) -> bool:
        """Return whether there is a sum that a tensor's gradient can be added to."""
        return tensor in self._gradients or tensor in self._accumulators

    def _sum(self, tensor: str) -> Factor:
        """Return the sum that a tensor's gradient is added to in place: the accumulator of a
        parameter, or the gradient so far.
        """
        return self._accumulators[tensor] if tensor in self._accumulators else self._row_sum(tensor)

    def _row_sum(self, tensor: str) -> Tensor:
        """Return the gradient so far, to be added to in place."""
        # Copy before the first write, in case somebody else holds the tensor.
        if tensor not in self._sums:
            self._gradients[tensor] = self._gradients[tensor].clone()
            self._sums.add(tensor)
        return self._gradients[tensor]


def _is_product(step: Instruction, graph: Graph) -> bool:
    """Return whether an instruction is the input gradient of a product with a weight of the
    backbone, and nothing else.
    """
    # A node that also gives a weight's or bias's gradient needs its own rows apart from others'.
    if step.kind != "reverse" or step.wanted != ("x",) or not step.node.operator.joins_rows:
        return False
    return graph.spec[step.node.input["weight"]].kind == "weight"


def run_together(runs: Sequence[BackwardRun], graph: Graph) -> None:
    """Finish runs of different programs that add bypasses to one graph of the backbone.

    Each runs its own instructions, but a product with a weight of the backbone takes the rows of
    all runs that have it.
    """
    # Programs differ in their bypasses but share the backbone's nodes, at which runs can meet.
    place = {node.name: index for index, node in enumerate(graph.nodes)}
    waiting: dict[BackwardRun, str | None] = {run: run.advance_to_product(place) for run in runs}
    while left := {run: name for run, name in waiting.items() if name is not None}:
        # Backward, the last node comes first; a run that does not need its gradient never waits for
        # it.
        node = max(left.values(), key=lambda name: place[name])
        together = [run for run, name in left.items() if name == node]
        _multiply(together)
        waiting |= {run: run.advance_to_product(place) for run in together}


def _multiply(runs: Sequence[BackwardRun]) -> None:
    """Run the next instruction of each run, a product with the same weight, as one product."""
    if len(runs) == 1:
        runs[0].advance(1)
        return
    steps = [run._program.backward[run._next] for run in runs]
    products = []
    for run, step in zip(runs, steps, strict=True):
        *others, product = step.parts or (step,)
        for other in others:  # of fused ones, what is not a product with that weight
            run._run(other)
        products.append(product)
    gradients = [
        run._output_gradients(product)["y"] for run, product in zip(runs, products, strict=True)
    ]
    # The only input is the backbone's weight, which is the same for all runs.
    inputs, node = runs[0]._inputs(products[0]), products[0].node
    x_gradients = node.operator.vjp(
        ("x",), inputs, {"y": torch.cat(gradients)}, node.attribute, runs[0]._context
    )["x"]
    parts = torch.split(x_gradients, [gradient.shape[0] for gradient in gradients])
    for run, step, part in zip(runs, steps, parts, strict=True):
        run._accumulate(step.node.input["x"], part, is_new=True)
        run._finish(step)
