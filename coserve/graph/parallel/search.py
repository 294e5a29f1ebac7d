"""The search for the best placement of a graph: where collectives stand, and how each weight is
cut.

Operators say in which layouts they can run (`Operator.layouts`); every operator can run on whole
tensors. The search goes through the nodes in order and keeps, for each combination of states of the
tensors that are still read, the cheapest way to get there (dynamic programming). It is exact for
the cuts that readers ask for (`_demanded`) and for a graph of one output; of several outputs, each
ends in the first state that is wanted for it. Source: FlexLLM (arXiv 2402.18789), section 5.1.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from coserve.graph.ir import Graph, Node
from coserve.graph.layouts import COPIED, PART, WHOLE, AnyState, Given, Layout
from coserve.graph.operators.base import Operator
from coserve.graph.parallel.placement import Conversion, Decision, GraphPlacement, local_spec
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut, even_cut, united


class Score(NamedTuple):
    """A score of a placement. Less is better, and the first difference decides."""

    primary: int = 0
    """Elements that the search minimizes before all else: of matrices that a rank holds, or of a
    row that it sends.
    """
    secondary: int = 0
    """Elements that it minimizes next: those that a rank sends, or those that it holds."""
    num_collectives: int = 0
    """Collectives between nodes."""
    num_copied: int = 0
    """Nodes that run on whole tensors whose gradients are parts of a sum."""
    work: int = 0
    """Elements of a row that a rank computes."""


Forms: TypeAlias = frozenset[AnyState]
_Trail: TypeAlias = tuple["_Trail", Decision] | None
ScoreOf: TypeAlias = Callable[[int, int, int], Score]


def memory_first(weights: int, vectors: int, link: int) -> Score:
    """Score a backbone: a rank holds (and reads) as few elements of matrices as it can, then it
    sends as few as it can.

    Vectors do not count, since cutting them saves next to nothing.
    """
    return Score(primary=weights, secondary=link)


def link_first(weights: int, vectors: int, link: int) -> Score:
    """Score a bypass: ranks send as few elements of a row as they can, then hold as few of
    parameters.
    """
    return Score(primary=link, secondary=weights + vectors)


@lru_cache(maxsize=256)
def place_backbone(
    graph: Graph, size: int, *, fixed: tuple[tuple[str, AnyState], ...] = ()
) -> GraphPlacement:
    """Find the placement of a part of the backbone, whose inputs and outputs every rank has whole.

    Args:
        graph: the whole graph.
        size: number of ranks.
        fixed: weights whose states are no choice, and these states.

    Raises:
        GraphError: a number of heads does not go with the number of ranks; the message names both.
    """
    search = Search(
        graph, size, score=memory_first, start={name: (state,) for name, state in fixed}
    )
    best = search.run(dict.fromkeys(graph.outputs, (WHOLE,)))
    assert best is not None, "all ranks can run everything"
    return best[1]


class Search:
    """The search for the best placement of one graph."""

    def __init__(
        self,
        graph: Graph,
        size: int,
        *,
        score: ScoreOf,
        start: Mapping[str, Collection[AnyState]] | None = None,
        wanted: Mapping[str, Cut] | None = None,
        may_take: bool = False,
    ) -> None:
        """Prepare a search.

        Args:
            graph: the whole graph.
            size: number of ranks.
            score: of the elements of matrices and of vectors that a rank holds, and of the elements
                of a row that it sends.
            start: states of inputs and weights that are there from the start; others are whole.
            wanted: cuts in which outputs can be used.
            may_take: whether ranks may take their columns of what all have.
        """
        self._graph, self._size, self._score, self._may_take = graph, size, score, may_take
        self._start = dict(start or {})
        self._last = {
            name: index for index, node in enumerate(graph.nodes) for name in node.input.values()
        }
        # Outputs are read after all nodes, so their states distinguish ways to the end.
        self._last |= dict.fromkeys(graph.outputs, len(graph.nodes))
        self._cuts = _demanded(graph, size, wanted or {})
        self._options: dict[tuple[str, tuple[tuple[str, Forms], ...]], list[Layout]] = {}

    def run(self, ends: Mapping[str, Collection[AnyState]]) -> tuple[Score, GraphPlacement] | None:
        """Return the best placement that gives each output in one of these states, if there is
        any.
        """
        inputs = {
            tensor.name: frozenset(self._start.get(tensor.name, (WHOLE,)))
            for tensor in self._graph.tensors
            if _has_gradient(tensor)
            and tensor.name not in self._graph.producer
            and tensor.name in self._last
        }
        ways: dict[frozenset[tuple[str, Forms]], tuple[Score, _Trail]] = {
            frozenset(inputs.items()): (Score(), None)
        }
        for index, node in enumerate(self._graph.nodes):
            after: dict[frozenset[tuple[str, Forms]], tuple[Score, _Trail]] = {}
            for key, (score, trail) in ways.items():
                for forms, more, decision in self._steps(node, dict(key)):
                    # Only tensors that later nodes read tell two ways apart: the cheaper one stays.
                    left = frozenset(
                        (name, each)
                        for name, each in forms.items()
                        if self._last.get(name, -1) > index
                    )
                    total = _plus(score, more)
                    if left not in after or total < after[left][0]:
                        after[left] = (total, (trail, decision))
            ways = after
        ended = [
            each
            for key, (score, trail) in ways.items()
            for each in self._ended(dict(key), score, trail, ends)
        ]
        return min(ended, key=lambda each: each[0], default=None)

    def _ended(
        self,
        forms: dict[str, Forms],
        score: Score,
        trail: _Trail,
        ends: Mapping[str, Collection[AnyState]],
    ) -> Iterator[tuple[Score, GraphPlacement]]:
        """Yield the placements that end in the states wanted; of several outputs, each in its first
        state.
        """
        choices = (
            [{name: state} for name, states in ends.items() for state in states]
            if len(ends) == 1
            else [{name: next(iter(states)) for name, states in ends.items()}]
        )
        decisions = tuple(reversed(list(_decisions(trail))))
        for choice in choices:
            left, last, link = dict(forms), list[Conversion](), 0
            for name, state in choice.items():
                steps = self._converted(name, left[name], state)
                if steps is None:
                    break
                last += steps
                left[name] |= {step.after for step in steps}
                link += sum(self._link(step) for step in steps)
            else:
                total = _plus(
                    _plus(score, self._score(0, 0, link)), Score(num_collectives=len(last))
                )
                yield (
                    total,
                    GraphPlacement(
                        graph=self._graph,
                        size=self._size,
                        decisions=decisions,
                        last=tuple(last),
                        outputs=tuple(choice.items()),
                        start=self._start,
                    ),
                )

    def _steps(
        self, node: Node, forms: dict[str, Forms]
    ) -> Iterator[tuple[dict[str, Forms], Score, Decision]]:
        """Yield the ways to run a node from here: forms of all tensors afterwards, what it costs,
        and the decision.
        """
        specs = self._graph.slot_specs(node)
        rows = [slot for slot, _ in node.inputs if _has_gradient(specs[slot])]
        whole, copied = dict.fromkeys(rows, WHOLE), dict.fromkeys(rows, COPIED)
        outputs = node.output
        # Each candidate: a layout, whether its gradients are whole, and how many nodes it copies.
        candidates = [
            (Layout(inputs=whole, outputs=dict.fromkeys(outputs, WHOLE)), True, 0),
            (Layout(inputs=copied, outputs=dict.fromkeys(outputs, COPIED)), False, 1),
            *(
                (layout, False, 0)
                for layout in self._layouts(node, {slot: forms[node.input[slot]] for slot in rows})
            ),
        ]
        # Each candidate in turn: the states that it needs, the collectives that lead there, and its
        # cost.
        for layout, is_whole, num_copied in candidates:
            states: dict[str, AnyState] = dict.fromkeys(node.tensor, WHOLE)
            if not is_whole:
                states |= dict.fromkeys(rows, COPIED)
            states |= {slot: state for slot, state in layout.inputs.items() if slot in node.input}
            states |= {
                slot: state for slot, state in layout.outputs.items() if _has_gradient(specs[slot])
            }
            # Weights and constants do not change their state: there are no collectives for them.
            if any(
                states[slot] not in self._start[name]
                for slot, name in node.inputs
                if slot not in rows and name in self._start
            ):
                continue
            after, conversions = dict(forms), list[Conversion]()
            for slot in rows:
                name = node.input[slot]
                # Without a gradient, WHOLE and COPIED are the same: take the one that is there.
                if node.operator.needs.get(slot, ()) is None and states[slot] in (WHOLE, COPIED):
                    states[slot] = (
                        WHOLE
                        if WHOLE in after[name]
                        else COPIED
                        if COPIED in after[name]
                        else WHOLE
                    )
                steps = self._converted(name, after[name], states[slot])
                if steps is None:
                    break
                conversions += steps
                # A converted form stays: a later reader of it pays for no second collective.
                after[name] = after[name] | {step.after for step in steps}
            else:
                after |= {
                    name: frozenset({states[slot]})
                    for slot, name in node.outputs
                    if _has_gradient(specs[slot])
                }
                # What a rank stores for this node; only weights and parameters count, not rows.
                held = [
                    _held(specs[slot], states[slot])
                    for slot, _ in node.inputs
                    if _is_held(specs[slot])
                ]
                link = layout.link + sum(self._link(step) for step in conversions)
                more = self._score(
                    sum(num for num, is_matrix in held if is_matrix),
                    sum(num for num, is_matrix in held if not is_matrix),
                    link,
                )
                decision = Decision(
                    node=node,
                    op=layout.op or node.op,
                    states=states,
                    conversions=tuple(conversions),
                    is_whole=is_whole,
                )
                # The last tie-breaker: of equal placements, the one whose ranks compute less.
                work = sum(
                    prod(local_spec(specs[slot], states[slot]).shape) for slot in node.output
                )
                further = Score(num_collectives=len(conversions), num_copied=num_copied, work=work)
                yield after, _plus(more, further), decision

    def _layouts(self, node: Node, states: dict[str, Forms]) -> list[Layout]:
        # Many ways reach a node with the same states of its inputs; layouts depend on nothing else.
        key = (node.name, tuple(states.items()))
        if key not in self._options:
            given = Given(
                size=self._size,
                specs=self._graph.slot_specs(node),
                attributes=node.attribute,
                states=states,
                cuts={slot: self._cuts[name] for slot, name in node.outputs if name in self._cuts},
            )
            self._options[key] = list(node.operator.layouts(given))
        return self._options[key]

    def _converted(self, name: str, forms: Forms, wanted: AnyState) -> list[Conversion] | None:
        """Return the collectives that bring a tensor to a state; None if none do."""
        if wanted in forms:
            return []
        if wanted is WHOLE:
            # A gather moves half of what a sum does.
            collectives: list[tuple[str, AnyState]] = [
                ("rank_gather", each) for each in forms if isinstance(each, Cut)
            ]
            collectives += [("rank_sum", PART)] if PART in forms else []
            return (
                [Conversion(collectives[0][0], name, collectives[0][1], WHOLE)]
                if collectives
                else None
            )
        # Forward a copy is the tensor itself; it exists for its backward pass, which sums.
        if wanted is COPIED:
            before = self._converted(name, forms, WHOLE)
            return (
                None if before is None else [*before, Conversion("rank_copy", name, WHOLE, COPIED)]
            )
        if wanted is PART and self._may_take:
            before = self._converted(name, forms, WHOLE)
            return (
                None if before is None else [*before, Conversion("rank_first", name, WHOLE, PART)]
            )
        # From COPIED: the gradient of a take covers one rank's columns only, and the copy adds all
        # up.
        if isinstance(wanted, Cut) and self._may_take:
            before = self._converted(name, forms, COPIED)
            return (
                None if before is None else [*before, Conversion("rank_take", name, COPIED, wanted)]
            )
        return None

    def _link(self, step: Conversion) -> int:
        """Return the elements of a row that a collective moves, forward and backward together."""
        # A sum is a scatter and a gather, hence twice the width; a copy sums its gradient instead.
        width = self._graph.spec[step.tensor].shape[-1]
        return {"rank_sum": 2 * width, "rank_copy": 2 * width, "rank_gather": width}.get(step.op, 0)


def _demanded(graph: Graph, size: int, wanted: Mapping[str, Cut]) -> dict[str, Cut]:
    """Return the cut in which the readers of a row tensor can use it, or could gather it."""
    asked: dict[str, list[tuple[Operator | None, Cut]]] = {}
    for name in graph.outputs:
        cut = wanted.get(name) or even_cut(graph.spec[name].shape[-1], size, padded=True)
        assert cut is not None
        asked[name] = [(None, cut)]
    cuts = dict[str, Cut]()
    for node in reversed(graph.nodes):
        for name in node.output.values():
            width = graph.spec[name].shape[-1] if graph.spec[name].shape else 1
            # Without a demand: columns side by side, which a later gather can join.
            cut = _common(asked[name]) if name in asked else even_cut(width, size)
            if cut is not None:
                cuts[name] = cut
        given = Given(
            size=size,
            specs=graph.slot_specs(node),
            attributes=node.attribute,
            # No forms yet: demands follow from the cuts of the outputs alone, on the way back.
            states={
                slot: frozenset() for slot, name in node.inputs if _has_gradient(graph.spec[name])
            },
            cuts={slot: cuts[name] for slot, name in node.outputs if name in cuts},
        )
        for slot, cut in node.operator.demands(given).items():
            asked.setdefault(node.input[slot], []).append((node.operator, cut))
    return cuts


def _common(asked: list[tuple[Operator | None, Cut]]) -> Cut | None:
    """Return the one cut that goes with those that readers ask for; None if there is none.

    Args:
        asked: the readers, None for the graph's output, and what each asks for. One that takes any
            cut asks for the plainest, and what others ask for decides.
    """
    decisive = [
        (rule, cut) for rule, cut in asked if rule is not None and not rule.takes_any_cut
    ] or asked
    cuts = [cut for _, cut in decisive]
    if all(rule is not None and rule.reads_some_columns for rule, _ in decisive):
        return united(cuts)
    return cuts[0] if cuts and all(cut == cuts[0] for cut in cuts) else None


def _has_gradient(spec: TensorSpec) -> bool:
    """Return whether a tensor is rows of floats."""
    return spec.kind == "row" and (spec.dtype is None or spec.dtype.is_floating_point)


def _is_held(spec: TensorSpec) -> bool:
    return spec.kind in ("weight", "parameter")


def _held(spec: TensorSpec, state: AnyState) -> tuple[int, bool]:
    """Return the elements of a weight that a rank holds, and whether it is a matrix."""
    return prod(local_spec(spec, state).shape), len(spec.shape) > 1


def _plus(a: Score, b: Score) -> Score:
    return Score(*(x + y for x, y in zip(a, b, strict=True)))


def _decisions(trail: _Trail) -> Iterator[Decision]:
    while trail is not None:
        trail, decision = trail
        yield decision
