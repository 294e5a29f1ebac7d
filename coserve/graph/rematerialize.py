"""The choice of what to keep of the forward pass: everything that the backward pass reads, or less
of it for a few FLOPs more.

FlexLLM (section 5.2, algorithm 1, step 2) drops a tensor when its inputs are kept and its operator
is cheap. Here the choice is exact: for every number of bytes, the set of tensors that costs the
fewest FLOPs to compute again. A tensor that the backward pass reads is in one of these states.

- saved: kept by the forward pass.
- divided: all ranks of a group have it alike, each keeps some columns (`graph.division`), and they
  gather it.
- restored: returned by the VJP of the operator that made it, for readers that can wait for that:
  gradients of weights and parameters, which nothing waits for. No operator runs again, and what the
  VJP adds to its own work (a product or two per element of what it holds already) is counted as
  free.
- recomputed: computed again from its operator's inputs, which are then needed themselves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch

from coserve.errors import BudgetError
from coserve.graph.differentiate import BackwardGraph
from coserve.graph.division import UNDIVIDED, Division
from coserve.graph.ir import Graph, Node


@dataclass(frozen=True, kw_only=True)
class Retention:
    """One choice, with its cost. Tensors are named as in the graph."""

    saved: frozenset[str]
    """Tensors that the forward pass keeps whole."""
    restored: frozenset[str]
    """Tensors that a VJP returns."""
    recomputed: frozenset[str]
    """Tensors that are computed again."""
    bytes_per_token: int
    """Bytes that are kept per row."""
    extra_flops_fraction: float
    """Extra FLOPs, as a share of the forward and backward pass with nothing recomputed or gathered.
    Bytes that a link moves count as the FLOPs that a rank computes meanwhile.
    """
    divided: frozenset[str] = frozenset()
    """Tensors of which each rank keeps its columns."""
    division: Division = UNDIVIDED
    """Division among the ranks."""


# A need: a tensor, and whether all of its readers can wait until its producer has been reversed.
_Needs = frozenset[tuple[str, bool]]


@dataclass(frozen=True)
class _Partial:
    """A choice under way: decisions for the tensors after some node."""

    num_bytes: int
    """Bytes that are kept per row."""
    flops: float
    """Extra FLOPs of a row."""
    saved: frozenset[str] = frozenset()
    """Tensors that are kept whole."""
    restored: frozenset[str] = frozenset()
    """Tensors that a VJP returns."""
    recomputed: frozenset[str] = frozenset()
    """Tensors that are computed again."""
    divided: frozenset[str] = frozenset()
    """Tensors of which each rank keeps its columns."""

    def and_then(self, step: "_Partial") -> "_Partial":
        """Return the choice with the decisions for one more node."""
        return _Partial(
            self.num_bytes + step.num_bytes,
            self.flops + step.flops,
            self.saved | step.saved,
            self.restored | step.restored,
            self.recomputed | step.recomputed,
            self.divided | step.divided,
        )


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Measures by which choices are weighed."""

    compute_dtype: torch.dtype
    """Dtype of the tensors that have none of their own."""
    mean_context_len: float
    """Mean number of keys that a row attends to."""
    division: Division = UNDIVIDED
    """Tensors that ranks may keep in pieces."""


def save_all(backward: BackwardGraph, by: Weighing) -> Retention:
    """Return the choice that computes nothing twice: pruning (and restoring) alone.

    A tensor that is another one under a second name is not kept twice. Each of several ranks keeps
    some columns of what all have alike if that reduces bytes times the seconds of a pass, for which
    a pack holds them: a link may be so slow that gathering takes longer than it is worth.
    """
    choices = _search(backward, by, recompute=False)
    return min(
        choices, key=lambda choice: choice.bytes_per_token * (1 + choice.extra_flops_fraction)
    )


def frontier(backward: BackwardGraph, by: Weighing) -> tuple[Retention, ...]:
    """Return every choice that no other beats in both bytes and FLOPs, from the most bytes (nothing
    recomputed) to the fewest.
    """
    return _search(backward, by, recompute=True)


def rematerialize(backward: BackwardGraph, budget_bytes_per_token: int, by: Weighing) -> Retention:
    """Return the choice with the fewest extra FLOPs that keeps at most this many bytes per token.

    Raises:
        BudgetError: none keeps so little.
    """
    choices = frontier(backward, by)
    # The frontier begins with the fewest FLOPs, so the first that fits costs the least.
    for choice in choices:
        if choice.bytes_per_token <= budget_bytes_per_token:
            return choice
    least = choices[-1].bytes_per_token
    raise BudgetError(
        f"a block keeps at least {least} bytes per token; {budget_bytes_per_token} is not enough"
    )


def keep_least(backward: BackwardGraph, max_recompute: float, by: Weighing) -> Retention:
    """Return the choice that keeps the fewest bytes, among those with at most these extra FLOPs as
    a share of the forward and backward pass. The extra FLOPs of `save_all` are always allowed.
    """
    most = max(max_recompute, save_all(backward, by).extra_flops_fraction)
    # More FLOPs mean fewer bytes along the frontier: the last one allowed keeps the least.
    return [choice for choice in frontier(backward, by) if choice.extra_flops_fraction <= most][-1]


def _search(backward: BackwardGraph, by: Weighing, *, recompute: bool) -> tuple[Retention, ...]:
    """Search by dynamic programming from the last node to the first, over the set of tensors that
    are still needed.

    A graph of a transformer block is narrow, so there are few such sets. Dominated choices are
    dropped for each.
    """
    # From the last node to the first, since recomputing a tensor makes its node's inputs needed,
    # and these come from earlier nodes.
    partials: dict[_Needs, list[_Partial]] = {_first_needs(backward): [_Partial(0, 0.0)]}
    for node in reversed(backward.graph.nodes):
        after: dict[_Needs, list[_Partial]] = {}
        for needs, choices in partials.items():
            for rest, step in _decisions(backward, node, needs, by, recompute):
                after.setdefault(rest, []).extend(choice.and_then(step) for choice in choices)
        partials = {needs: _undominated(choices) for needs, choices in after.items()}
    total = _total_flops(backward, by)
    # What is still needed now are the graph's own inputs, which can only be kept.
    finished = [
        choice.and_then(step)
        for needs, choices in partials.items()
        for step in _inputs(backward.graph, needs, by)
        for choice in choices
    ]
    return tuple(
        Retention(
            saved=choice.saved,
            restored=choice.restored,
            recomputed=choice.recomputed,
            bytes_per_token=choice.num_bytes,
            extra_flops_fraction=choice.flops / total if total else 0.0,
            divided=choice.divided,
            division=by.division,
        )
        for choice in sorted(_undominated(finished), key=lambda choice: choice.flops)
    )


def _inputs(graph: Graph, needs: _Needs, by: Weighing) -> Iterator[_Partial]:
    """Yield the ways to keep the graph's own inputs."""
    names = sorted(name for name, _ in needs)
    for ways in product(*(_kept(name, by) for name in names)):
        yield _keeping(graph, dict(zip(names, ways, strict=True)), by)


def _kept(name: str, by: Weighing) -> list[str]:
    """Return the ways to keep a tensor."""
    return ["saved", "divided"] if name in by.division.tensors else ["saved"]


def _keeping(graph: Graph, ways: Mapping[str, str], by: Weighing) -> _Partial:
    """Return the cost of the tensors that are kept, each in its way; others cost nothing here."""
    names = {
        way: frozenset(name for name, each in ways.items() if each == way)
        for way in ("saved", "divided")
    }
    num_bytes = sum(graph.spec[name].num_bytes(by.compute_dtype) for name in names["saved"])
    pieces = [graph.spec[name] for name in sorted(names["divided"])]
    return _Partial(
        num_bytes + sum(by.division.saved_bytes(spec, by.compute_dtype) for spec in pieces),
        sum(by.division.gather_flops(spec, by.compute_dtype) for spec in pieces),
        saved=names["saved"],
        divided=names["divided"],
    )


def _first_needs(backward: BackwardGraph) -> _Needs:
    """Return the tensors that the VJPs and later windows of the forward pass read."""
    graph = backward.graph
    # Keys and values are read by later windows' forward pass, too, so they can never wait.
    needed = {(name, False) for name in graph.kv_tensors}
    for gradient in backward.nodes:
        for slot in gradient.wanted:
            # Nothing waits for a parameter's gradient, so it can come after the VJP that restores a
            # tensor.
            can_wait = backward.is_leaf(gradient.node.input[slot])
            needed |= {
                (name, can_wait)
                for name in gradient.reads([slot]).values()
                if graph.spec[name].kind == "row"
            }
    return _merged(needed)


def _merged(needs: set[tuple[str, bool]]) -> _Needs:
    """Merge needs to one per tensor, which can wait only if all its readers can."""
    return frozenset((name, wait) for name, wait in needs if not wait or (name, False) not in needs)


def _decisions(
    backward: BackwardGraph, node: Node, needs: _Needs, by: Weighing, recompute: bool
) -> Iterator[tuple[_Needs, _Partial]]:
    """Yield the ways to provide a node's needed outputs, each with the needs that are left and its
    cost.
    """
    graph = backward.graph
    # The order is the same in every process: ranks that hold a model together must choose alike
    # among equals.
    outputs = sorted((name, wait) for name, wait in needs if name in node.output.values())
    if not outputs:
        yield needs, _Partial(0, 0.0)
        return
    rest = set(needs) - set(outputs)
    # Restoring or recomputing gives a window's own rows only, which is not enough for what other
    # windows read. An operator with a state cannot run again, since its state has moved on.
    is_free = {
        name: name not in graph.kv_tensors and name not in graph.lead_tensors for name, _ in outputs
    }
    # An alias costs no FLOPs, so it is made again even where recomputing is not asked for.
    runs_again = (
        recompute and not node.operator.state_size(node.attribute)
    ) or node.operator.is_alias
    options = [
        _kept(name, by)
        + ["restored"] * (wait and name not in graph.lead_tensors and can_restore(backward, name))
        + ["recomputed"] * (runs_again and is_free[name])
        for name, wait in outputs
    ]
    # One way per needed output; running the node again once gives all that are recomputed.
    for ways in product(*options):
        way_of = {name: way for (name, _), way in zip(outputs, ways, strict=True)}
        again, inputs, flops = (
            frozenset(n for n, way in way_of.items() if way == "recomputed"),
            set(),
            0.0,
        )
        if again:
            # The inputs are read when the node runs again, hence as early as its most urgent
            # output.
            can_wait = all(wait for name, wait in outputs if name in again)
            inputs = {
                (name, can_wait) for name in node.input.values() if graph.spec[name].kind == "row"
            }
            flops = node.operator.flops_per_row(
                graph.slot_specs(node), node.attribute, by.mean_context_len
            )
            if node.operator.moves:
                # A collective that runs again takes the link's time again.
                flops += by.division.link_flops(graph, node, by.compute_dtype)
        restored = frozenset(name for name, way in way_of.items() if way == "restored")
        step = _keeping(graph, way_of, by).and_then(
            _Partial(0, flops, restored=restored, recomputed=again)
        )
        yield _merged(rest | inputs), step


def can_restore(backward: BackwardGraph, tensor: str) -> bool:
    """Return whether the VJP of the tensor's producer runs, holds all of that operator's row
    inputs, and can return the tensor.
    """
    node = backward.graph.producer[tensor]
    gradient = backward.gradient_node.get(node.name)
    if gradient is None or not any(node.output[slot] == tensor for slot in node.operator.restores):
        return False
    inputs = {name for name in node.input.values() if backward.graph.spec[name].kind == "row"}
    return inputs <= set(gradient.reads().values())


def _undominated(choices: list[_Partial]) -> list[_Partial]:
    """Return the choices that no other beats in both bytes and FLOPs."""
    best: list[_Partial] = []
    for choice in sorted(choices, key=lambda choice: (choice.flops, choice.num_bytes)):
        # By FLOPs: a dearer choice is worth something only if it keeps fewer bytes than all before.
        if not best or choice.num_bytes < best[-1].num_bytes:
            best.append(choice)
    return best


def forward_flops_per_row(graph: Graph, mean_context_len: float) -> float:
    """Return the FLOPs of one row through a graph."""
    return sum(
        node.operator.flops_per_row(graph.slot_specs(node), node.attribute, mean_context_len)
        for node in graph.nodes
    )


def _total_flops(backward: BackwardGraph, by: Weighing) -> float:
    """Return the FLOPs of a row, forward and backward, with what the link moves as FLOPs of the
    same time.
    """
    graph = backward.graph
    reverse = sum(
        gradient.node.operator.vjp_flops_per_row(
            gradient.wanted,
            graph.slot_specs(gradient.node),
            gradient.node.attribute,
            by.mean_context_len,
        )
        for gradient in backward.nodes
    )
    moving = [node for node in graph.nodes if node.operator.moves]
    moving += [
        gradient.node for gradient in backward.nodes if gradient.node.operator.moves_gradient
    ]
    link = sum(by.division.link_flops(graph, node, by.compute_dtype) for node in moving)
    return forward_flops_per_row(graph, by.mean_context_len) + reverse + link
