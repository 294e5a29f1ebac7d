"""Programs: the forward and backward pass of a block as data that can be printed, counted and
stopped between any two instructions.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from coserve.graph.compress import compress
from coserve.graph.differentiate import BackwardGraph, GradientNode, differentiate, prune
from coserve.graph.division import gathering, piece_name, with_pieces
from coserve.graph.fuse import beside
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Cost, Load
from coserve.graph.rematerialize import Retention, Weighing, keep_least, rematerialize, save_all


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One step of a backward pass."""

    kind: Literal["recompute", "reverse"]
    """"recompute": run the node again (or gather the columns that ranks keep of its output).
    "reverse": run its VJP.
    """
    node: Node
    """The node that is run again or reversed."""
    wanted: tuple[str, ...] = ()
    """Slots of a reversed node: inputs whose gradients are computed, and outputs that are restored.
    """
    reads: tuple[tuple[str, str], ...] = ()
    """Pairs of a slot and the forward tensor that it reads."""
    frees: tuple[str, ...] = ()
    """Forward tensors that no later instruction reads."""
    frees_gradients: tuple[str, ...] = ()
    """Gradients that no later instruction reads."""
    parts: tuple["Instruction", ...] = ()
    """Instructions that this one was fused of, in their order."""

    @property
    def gradients(self) -> tuple[str, ...]:
        """Return the tensors whose gradients it contributes to."""
        return tuple(self.node.input[slot] for slot in self.wanted if slot in self.node.input)

    @property
    def restores(self) -> tuple[str, ...]:
        """Return the forward tensors that it restores."""
        return tuple(self.node.output[slot] for slot in self.wanted if slot in self.node.output)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A graph's forward nodes, the tensors to save, and the backward instructions for the gradients
    that were asked for.
    """

    graph: Graph
    """The graph, with bypasses attached."""
    asked: tuple[str, ...]
    """Tensors whose gradients the backward pass gives."""
    retention: Retention
    """Choice of the tensors that are kept, restored and recomputed."""
    backward: tuple[Instruction, ...]
    """Instructions of the backward pass, in order."""

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Return the row tensors to keep from the forward pass, in the order of the graph."""
        kept = self.retention.saved | self._pieces
        return tuple(name for name in self.graph.spec if name in kept)

    @cached_property
    def only_saved(self) -> Mapping[str, Node]:
        """Return the nodes whose results are computed only to be saved (packed signs, a rank's
        columns), by the saved tensor's name. The forward pass runs them for the rows that keep
        these.
        """
        producers = {
            name: self.graph.producer[name] for name in self.saved if name in self.graph.producer
        }
        return {
            name: node
            for name, node in producers.items()
            if node.op == "sign_bits" or name in self._pieces
        }

    @cached_property
    def _pieces(self) -> frozenset[str]:
        return frozenset(map(piece_name, self.retention.divided))

    def saved_bytes_per_token(self, compute_dtype: torch.dtype) -> int:
        """Return the bytes of saved tensors per row."""
        return sum(self.graph.spec[name].num_bytes(compute_dtype) for name in self.saved)

    def forward_cost(self, load: Load) -> Cost:
        """Return the cost of the forward nodes."""
        return self.graph.cost(load)

    def backward_cost(self, load: Load) -> Cost:
        """Return the cost of the backward instructions, recomputation included."""
        return sum((self.step_cost(step, load) for step in self.backward), Cost())

    def step_cost(self, step: Instruction, load: Load) -> Cost:
        """Return the cost of one of the backward instructions."""
        if step.kind == "recompute":
            return self.graph.node_cost(step.node, load)
        wanted = [slot for slot in step.wanted if slot in step.node.input]
        specs = self.graph.slot_specs(step.node)
        return step.node.operator.vjp_cost(wanted, specs, step.node.attribute, load)


def compile_program(
    graph: Graph,
    asked: Collection[str],
    by: Weighing,
    *,
    of: Collection[str] | None = None,
    budget_bytes_per_token: int | None = None,
    max_recompute: float = 0.0,
    fused: Collection[str] = (),
) -> Program:
    """Compile a graph (with bypasses attached) to a program.

    Args:
        asked: tensors whose gradients are wanted: adapter parameters, chosen weights, the block's
            input.
        by: measures by which the choices of what to keep are weighed.
        of: outputs to differentiate (default: all).
        budget_bytes_per_token: maximum bytes of saved tensors per row.
        max_recompute: without a budget, the maximum FLOPs to spend on recomputing in order to keep
            less, as a share of the forward and backward pass; 0: everything that the backward pass
            reads is saved.
        fused: fused operators that the backward pass may use (`graph.fuse`).

    Raises:
        GraphError: a rule is missing.
        BudgetError: the budget is below what any choice needs.
    """
    backward = backward_graph(graph, asked, of=of)
    if budget_bytes_per_token is not None:
        retention = rematerialize(backward, budget_bytes_per_token, by)
    elif max_recompute:
        retention = keep_least(backward, max_recompute, by)
    else:
        retention = save_all(backward, by)
    return link(backward, retention, asked, fused)


def backward_graph(
    graph: Graph, asked: Collection[str], *, of: Collection[str] | None = None
) -> BackwardGraph:
    """Return the gradients of `of` (default: all outputs) that lead to those asked for, with packed
    signs where a gradient needs no more.
    """
    return compress(prune(differentiate(graph, of), asked))


def link(
    backward: BackwardGraph,
    retention: Retention,
    asked: Collection[str],
    fused: Collection[str] = (),
) -> Program:
    """Return the program of a backward graph under one choice of what to keep."""
    # Fuse before `_with_frees`: what no later instruction reads depends on the final order.
    steps = _fused(_Scheduler(backward, retention).schedule(), fused)
    graph = with_pieces(backward.graph, retention.divided, retention.division)
    return Program(
        graph=graph,
        asked=tuple(asked),
        retention=retention,
        backward=_with_frees(steps, frozenset(asked)),
    )


class _Scheduler:
    """An order of a backward pass: the reverse of every node, recomputation just before its first
    reader, and whatever waits for restored tensors after these.
    """

    def __init__(self, backward: BackwardGraph, retention: Retention) -> None:
        self._backward, self._graph, self._retention = backward, backward.graph, retention
        self._available = {
            spec.name for spec in self._graph.tensors if spec.kind != "row"
        } | retention.saved
        self._steps: list[Instruction] = []

    def schedule(self) -> list[Instruction]:
        # Gradients of parameters may read a tensor that the VJP of an earlier node restores. They
        # wait for it here, which holds up nothing: no other gradient reads theirs.
        waiting: list[GradientNode] = []
        for gradient in self._backward.nodes:
            now = tuple(slot for slot in gradient.wanted if self._can_read(gradient, slot))
            later = tuple(slot for slot in gradient.wanted if slot not in now)
            if later:
                waiting.append(replace(gradient, wanted=later))
            # Row gradients are never deferred: only leaves may wait (`Retention.restored`).
            if now:
                self._reverse(replace(gradient, wanted=now))
            # A reversal may restore what others wait for, so the list is made anew after each.
            while ready := [
                late for late in waiting if all(self._can_read(late, slot) for slot in late.wanted)
            ]:
                waiting.remove(ready[0])
                self._reverse(ready[0])
        assert not waiting, (
            f"gradients of {[late.node.name for late in waiting]} wait for tensors that nothing "
            f"provides"
        )
        return self._steps

    def _can_read(self, gradient: GradientNode, slot: str) -> bool:
        return all(self._can_provide(name) for name in gradient.reads([slot]).values())

    def _can_provide(self, tensor: str) -> bool:
        if tensor in self._available or tensor in self._retention.divided:
            return True
        if tensor not in self._retention.recomputed:
            return False
        return all(self._can_provide(name) for name in self._graph.producer[tensor].input.values())

    def _provide(self, tensor: str) -> None:
        if tensor in self._available:
            return
        if tensor in self._retention.divided:
            node = gathering(self._graph.spec[tensor], self._retention.division)
        else:
            node = self._graph.producer[tensor]
            # Depth first: the steps that make a node's inputs come before the node's own.
            for name in node.input.values():
                self._provide(name)
        # One run gives all outputs of the node, whichever of them is needed.
        self._available.update(node.output.values())
        self._steps.append(Instruction(kind="recompute", node=node, reads=node.inputs))

    def _reverse(self, gradient: GradientNode) -> None:
        reads, node = gradient.reads(), gradient.node
        for name in reads.values():
            self._provide(name)
        restored: tuple[str, ...] = ()
        # A VJP restores an output only while it holds every row input (see `can_restore`).
        if {name for name in node.input.values() if self._graph.spec[name].kind == "row"} <= set(
            reads.values()
        ):
            awaited = self._retention.restored - self._available
            restored = tuple(slot for slot, name in node.outputs if name in awaited)
            self._available.update(node.output[slot] for slot in restored)
        if restored:  # the output may depend on weights that the gradients do not (a bias)
            reads |= {
                slot: name for slot, name in node.inputs if self._graph.spec[name].kind != "row"
            }
        step = Instruction(
            kind="reverse", node=node, wanted=gradient.wanted + restored, reads=tuple(reads.items())
        )
        self._steps.append(step)


def _fused(steps: list[Instruction], operators: Collection[str]) -> list[Instruction]:
    """Merge neighbouring instructions where one kernel gives their gradients of the same rows."""
    merged: list[Instruction] = []
    for step in steps:
        before = merged[-1] if merged else None
        if (
            before is None
            or before.kind != "reverse"
            or "x" not in before.wanted
            or step.wanted != ("x",)
        ):
            merged.append(step)
            continue
        node = beside(before.node, step.node, operators) if step.kind == "reverse" else None
        if node is None:
            merged.append(step)
            continue
        # Of the first node, gradients other than x's stay an instruction of their own, in its
        # place.
        merged.pop()
        if rest := tuple(slot for slot in before.wanted if slot != "x"):
            merged.append(_narrowed(before, rest))
        # The first node keeps its other gradients; that of x moves to the merged instruction.
        slots = {name: slot for slot, name in node.inputs}
        parts = (_narrowed(before, ("x",)), step)
        reads = tuple((slots[name], name) for part in parts for _, name in part.reads)
        merged.append(
            Instruction(kind="reverse", node=node, wanted=("x",), reads=reads, parts=parts)
        )
    return merged


def _narrowed(step: Instruction, wanted: tuple[str, ...]) -> Instruction:
    """Return the reverse of the same node for some of its gradients."""
    slots = step.node.operator.reads(wanted, step.node.tensor)
    return replace(
        step, wanted=wanted, reads=tuple(pair for pair in step.reads if pair[0] in slots)
    )


def _with_frees(steps: list[Instruction], asked: Collection[str]) -> tuple[Instruction, ...]:
    """Add to each instruction the tensors and gradients that no later one reads."""
    # Instructions are visited last to first: the first that touches a name is its last reader.
    tensors: set[str] = set()
    # Gradients that were asked for count as read at the end, so nothing frees them.
    gradients: set[str] = set(asked)
    finished = []
    for step in reversed(steps):
        read = [name for _, name in step.reads]
        outputs = step.node.output.values()
        # Outputs, too: a restored or recomputed one may have no further reader.
        frees = tuple(dict.fromkeys(name for name in (*read, *outputs) if name not in tensors))
        tensors.update(frees)
        frees_gradients = tuple(
            name for name in outputs if step.kind == "reverse" and name not in gradients
        )
        gradients.update(frees_gradients)
        finished.append(replace(step, frees=frees, frees_gradients=frees_gradients))
    return tuple(reversed(finished))
