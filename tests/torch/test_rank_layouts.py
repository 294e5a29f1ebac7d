"""Every layout of every operator against numbers: tensors are divided as it says, each rank runs
the operator, and what the ranks give together, forward and backward, is what one rank gives.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import together
from torch import Tensor

from coserve.graph.fusions import FUSIONS, GRADIENT_FUSIONS
from coserve.graph.ir import Graph, GraphBuilder
from coserve.graph.layouts import COPIED, FIRST, PART, WHOLE, AnyState, Given, Layout
from coserve.graph.operators import operator, operators
from coserve.graph.operators.base import Context
from coserve.kernels.cuts import Cut, even_cut, head_cut, repeated, side_by_side
from coserve.kernels.dropout import dropout_row_ids
from coserve.kernels.groups.threads import run_ranks
from coserve.kernels.plain import PlainBackend
from coserve.models.shares import piece

BACKEND = PlainBackend(torch.device("cpu"))
N, SIZE = 5, 2
EVEN = {width: even_cut(width, SIZE) for width in (4, 6, 8, 16, 24, 48)}
# What attention and gated delta layers look at lies outside their rows; whole families test them.
ELSEWHERE = {
    "attention",
    "gated_delta",
    "layer_norm",
    "route",
    "route_of_all",
    "cross_entropy",
    "linear_cross_entropy",
}
ELSEWHERE |= {"sign_bits", "other_rows", "other_columns"}  # these run on whole tensors


def graph_of(
    op: str,
    rows: Mapping[str, int],
    others: Mapping[str, tuple[str, tuple[int, ...]]],
    **attributes: Any,
) -> Graph:
    b = GraphBuilder()
    inputs: dict[str, str | None] = {slot: b.rows(slot, width) for slot, width in rows.items()}
    for slot, (kind, shape) in others.items():
        if kind == "weight":
            inputs[slot] = b.weight(slot, *shape)
        elif kind == "parameter":
            inputs[slot] = b.parameter(slot, *shape)
        elif kind == "ints":
            inputs[slot] = b.rows(slot, *shape, dtype=torch.int64)
        else:
            inputs[slot] = b.constant(
                slot, *shape, dtype=torch.int64 if slot.endswith("ids") else None
            )
    return b.build(b.apply(op, "y", inputs, **attributes))


W, P = "weight", "parameter"
HEADS = head_cut(1, 8, SIZE, name="heads", may_copy=True)
TWICE = repeated(EVEN[8], 2)
# Graph; states in which row inputs may be there; cuts in which the output can be used.
CASES: list[Any] = [
    *(
        (graph_of(op, {"x": 8}, {}, **attributes), {"x": [EVEN[8]]}, None)
        for op, attributes in (
            ("silu", {}),
            ("relu", {}),
            ("gelu", {"approximate": "tanh"}),
            ("clamp", {"most": 0.5}),
            ("soft_cap", {"cap": 2.0}),
        )
    ),
    (graph_of("scale", {"x": 8}, {}, factor=3.0), {"x": [EVEN[8], PART, HEADS]}, None),
    (
        graph_of("add", {"a": 8, "b": 8}, {}),
        {"a": [EVEN[8], PART, HEADS], "b": [EVEN[8], PART, HEADS]},
        None,
    ),
    (
        graph_of("mul", {"x": 8, "factor": 8}, {}, per_row=True),
        {"x": [EVEN[8], PART], "factor": [EVEN[8]]},
        None,
    ),
    (
        graph_of("mul", {"x": 8}, {"factor": (P, (8,))}, per_row=False),
        {"x": [EVEN[8], PART, HEADS]},
        None,
    ),
    (graph_of("silu_mul", {"gate": 8, "up": 8}, {}), {"gate": [EVEN[8]], "up": [EVEN[8]]}, None),
    (
        graph_of("clamped_swiglu", {"gate": 8, "up": 8}, {}, alpha=1.7, limit=0.7),
        {"gate": [EVEN[8]], "up": [EVEN[8]]},
        None,
    ),
    (graph_of("sigmoid_mul", {"gate": 8, "x": 8}, {}), {"gate": [EVEN[8]], "x": [EVEN[8]]}, None),
    (graph_of("sigmoid_mul", {"gate": 1, "x": 8}, {}), {"x": [EVEN[8], PART]}, None),
    (
        graph_of("add_vector", {"x": 8}, {"vector": (P, (8,))}, factor=0.5),
        {"x": [EVEN[8], PART]},
        None,
    ),
    (
        graph_of("other_vector", {"like": 8}, {"new": (P, (8,)), "old": (W, (8,))}),
        {"like": [EVEN[8], PART]},
        None,
    ),
    (graph_of("gain", {"x": 8}, {"factor": (P, (8, 1))}), {"x": [EVEN[8], PART]}, None),
    (
        graph_of(
            "magnitude",
            {"base": 8, "change": 8},
            {"magnitude": (P, (8,)), "norm": (W, (8,)), "bias": (W, (8,))},
        ),
        {"base": [EVEN[8], PART], "change": [EVEN[8], PART]},
        None,
    ),
    (
        graph_of("on_virtual_rows", {"x": 8, "other": 8}, {"tokens": ("ints", ())}),
        {"x": [EVEN[8], PART, HEADS], "other": [EVEN[8], PART, HEADS]},
        None,
    ),
    (
        graph_of("dropout", {"x": 8}, {"dropout_row_ids": ("constant", ())}, p=0.4, salt=7),
        {"x": [EVEN[8], PART]},
        None,
    ),
    (graph_of("columns", {"x": 24}, {}, groups=1, of=24, start=8, width=16), {"x": [PART]}, None),
    (
        graph_of("columns", {"x": 24}, {}, groups=4, of=6, start=2, width=4),
        {"x": [EVEN[24], PART]},
        None,
    ),
    (
        graph_of("columns", {"x": 24}, {}, groups=1, of=24, start=8, width=16),
        {"x": [side_by_side([EVEN[8], EVEN[16]])]},
        None,
    ),
    (
        graph_of("regroup", {"x": 24}, {}, groups=2, of=12, start=0, widths=(2, 4)),
        {"x": [EVEN[24], PART]},
        None,
    ),
    (
        graph_of("linear", {"x": 8}, {"weight": (W, (6, 8)), "bias": (W, (6,))}),
        {"x": [EVEN[8], PART]},
        EVEN[6],
    ),
    (graph_of("linear", {"x": 8}, {"weight": (W, (8, 8))}), {}, HEADS),
    (graph_of("low_rank", {"x": 8}, {"weight": (P, (6, 8))}), {"x": [EVEN[8], PART]}, EVEN[6]),
    (graph_of("low_rank", {"x": 8}, {"weight": (P, (8, 8))}), {}, HEADS),
    (
        graph_of(
            "dropout_low_rank",
            {"x": 8},
            {"weight": (P, (6, 8)), "dropout_row_ids": ("constant", ())},
            p=0.4,
            salt=7,
        ),
        {"x": [EVEN[8], PART]},
        EVEN[6],
    ),
    (
        graph_of("embedding", {}, {"ids": ("constant", ()), "weight": (W, (7, 6))}, offset=0),
        {},
        None,
    ),
    (
        graph_of(
            "embedding",
            {},
            {"ids": ("constant", ()), "weight": (P, (3, 6))},
            offset=0,
            virtual=True,
        ),
        {},
        EVEN[6],
    ),
    (
        graph_of(
            "expert_linear",
            {"x": 8},
            {"experts": ("ints", (2,)), "weight": (W, (3, 8, 8)), "bias": (W, (3, 8))},
            shared=True,
        ),
        {"x": [PART]},
        TWICE,
    ),
    (
        graph_of(
            "expert_linear",
            {"x": 16},
            {"experts": ("ints", (2,)), "weight": (W, (3, 6, 8)), "bias": (W, (3, 6))},
            shared=False,
        ),
        {"x": [TWICE]},
        None,
    ),
    (
        graph_of(
            "expert_linear",
            {"x": 8},
            {"experts": ("ints", (2,)), "weight": (W, (3, 8, 8))},
            shared=True,
        ),
        {},
        repeated(HEADS, 2),
    ),
    (graph_of("mixture", {"x": 16, "shares": 2}, {}), {"x": [PART]}, None),
    (
        graph_of("rms_norm", {"x": 24}, {"weight": (W, (4,))}, eps=0.05),
        {"x": [side_by_side([EVEN[8], EVEN[16]])]},
        None,
    ),
    *(
        (
            graph_of("rms_norm", {"x": 8}, {"weight": (W, (8,))}, eps=0.05, **more),
            {"x": [EVEN[8], HEADS]},
            None,
        )
        for more in ({}, {"plus_one": True})
    ),
    (
        graph_of("rope", {"x": 16}, {"cos": ("constant", (4,)), "sin": ("constant", (4,))}),
        {"x": [EVEN[16]]},
        None,
    ),
]


# Query heads on a rank each, and a key head that both have; and the same for each of two experts.
FUSED = side_by_side([EVEN[4], head_cut(1, 4, SIZE, name="heads", may_copy=True)])
EXPERTS: tuple[str, tuple[int, ...]] = ("ints", (2,))
PRODUCTS: list[Any] = [
    (graph_of("linear", {"x": 8}, {"weight": (W, (6, 8)), "bias": (W, (6,))}), 1),
    (graph_of("low_rank", {"x": 8}, {"weight": (P, (6, 8))}), 1),
    (
        graph_of(
            "dropout_low_rank",
            {"x": 8},
            {"weight": (P, (6, 8)), "dropout_row_ids": ("constant", ())},
            p=0.4,
            salt=7,
        ),
        1,
    ),
    (
        graph_of(
            "expert_linear", {"x": 16}, {"experts": EXPERTS, "weight": (W, (3, 6, 8))}, shared=False
        ),
        2,
    ),
]


def given_of(graph: Graph, states: Mapping[str, list[AnyState]], cut: Cut | None) -> Given:
    [node] = graph.nodes
    specs = graph.slot_specs(node)
    rows = [
        slot for slot, _ in node.inputs if specs[slot].kind == "row" and specs[slot].dtype is None
    ]
    return Given(
        size=SIZE,
        specs=specs,
        attributes=node.attribute,
        states={slot: frozenset([WHOLE, *states.get(slot, ())]) for slot in rows},
        cuts={} if cut is None else {"y": cut},
    )


@pytest.mark.parametrize("cut", [HEADS, FUSED], ids=["copies", "some-copies"])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product[0].nodes[0].op)
def test_a_product_of_columns_that_several_ranks_have_is_no_part_of_a_sum(product, cut):
    """Their products would be in the sum once for each rank that has them."""
    graph, times = product
    [node] = graph.nodes
    given = given_of(graph, {"x": [repeated(cut, times)]}, None)
    assert all(layout.outputs["y"] is not PART for layout in node.operator.layouts(given))
    given = given_of(graph, {"x": [repeated(EVEN[8], times)]}, None)
    assert any(layout.outputs["y"] is PART for layout in node.operator.layouts(given))


def test_a_norm_over_columns_of_which_some_are_copied_is_not_divided():
    graph = graph_of("rms_norm", {"x": 8}, {"weight": (W, (8,))}, eps=0.05)
    assert graph.nodes[0].operator.layouts(given_of(graph, {"x": [FUSED]}, None)) == []


def layouts() -> list[Any]:
    found = []
    for number, (graph, states, cut) in enumerate(CASES):
        [node] = graph.nodes
        given = given_of(graph, states, cut)
        rows = given.states
        copied = Layout(inputs=dict.fromkeys(rows, COPIED), outputs={"y": COPIED})
        for index, layout in enumerate([copied, *node.operator.layouts(given)]):
            found.append(pytest.param(graph, layout, id=f"{node.op}-{number}-{index}"))
    return found


def test_every_operator_that_ranks_divide_is_tested():
    tried = {graph.nodes[0].op for graph, _, _ in CASES}
    fused = {row.fused for row in (*FUSIONS, *GRADIENT_FUSIONS)}  # each rank fuses its own graph
    assert (
        tried | ELSEWHERE == {name for name in operators() if not name.startswith("rank_")} - fused
    )
    for name in ELSEWHERE - {"attention", "gated_delta"}:
        assert "layouts" not in vars(type(operator(name))) and not operator(name).by_columns


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].nodes[0].op)
def test_every_state_that_an_input_may_have_is_used(case):
    graph, states, cut = case
    found = graph.nodes[0].operator.layouts(given_of(graph, states, cut))
    used = {slot: {layout.inputs.get(slot) for layout in found} for slot in states}
    assert all(set(of_slot) <= used[slot] for slot, of_slot in states.items())


def parts_of(whole: Tensor, state: AnyState) -> list[Tensor]:
    """Return what each rank has of a tensor."""
    if state is PART:
        first = torch.randn_like(whole)
        return [first, whole - first]
    return [piece(whole, state, rank) for rank in range(SIZE)]


def copies_of(whole: Tensor, cut: Cut) -> list[Tensor]:
    """Return what each rank has of the gradient of a cut tensor: those of an entry's copies add up
    to that of it."""
    found = [cut.owned(cut.take(whole, rank), rank) for rank in range(SIZE)]
    for rank in range(1, SIZE):
        more = torch.randn_like(whole) * held(cut, whole, 0) * held(cut, whole, rank)
        found[0] = found[0] + cut.take(more, 0)
        found[rank] = found[rank] - cut.take(more, rank)
    return found


def held(cut: Cut, like: Tensor, rank: int) -> Tensor:
    """Return ones for what a rank has, and zeros elsewhere."""
    mask = torch.zeros_like(like)
    cut.put(mask, torch.ones(like.shape[0], cut.local), rank)
    return mask


def values_of(graph: Graph) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(0), {}
    for slot, spec in graph.slot_specs(graph.nodes[0]).items():
        shape = (N, *spec.shape) if spec.per_row else spec.shape
        found[slot] = torch.randn(shape, generator=generator)
        if spec.dtype == torch.int64:
            found[slot] = (
                torch.tensor([0, 5, -1, 2, -3])
                if not spec.shape
                else torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
            )
        if slot == "dropout_row_ids":
            found[slot] = dropout_row_ids(3, torch.arange(N))
    return found


@pytest.mark.parametrize(("graph", "layout"), layouts())
def test_ranks_together_give_what_one_gives(graph, layout):
    torch.manual_seed(0)
    [node] = graph.nodes
    specs, rule, whole = graph.slot_specs(node), node.operator, values_of(graph)
    alone = Context(backend=BACKEND)
    inputs = {slot: whole[slot] for slot in node.input}
    expected = rule.forward(inputs, node.attribute, alone)
    dy = torch.randn_like(expected["y"])
    wanted = [slot for slot in node.input if rule.needs[slot] is not None]
    gradients = rule.vjp(wanted, {**inputs, **expected}, {"y": dy}, node.attribute, alone)

    states: dict[str, AnyState] = dict.fromkeys(node.input, WHOLE)
    states |= {
        slot: COPIED for slot, spec in specs.items() if spec.kind == "row" and slot in wanted
    }
    states |= {slot: state for slot, state in layout.inputs.items() if slot in node.input} | dict(
        layout.outputs
    )
    given = {slot: parts_of(value, states[slot]) for slot, value in inputs.items()}
    # The gradient of what is a part, or whole, is whole; of a copy, and of copies of a piece, it is
    # a part.
    dys = parts_of(
        dy, PART if states["y"] is COPIED else WHOLE if states["y"] is PART else states["y"]
    )
    if isinstance(states["y"], Cut) and not states["y"].is_disjoint:
        dys = copies_of(dy, states["y"])
    local = operator(layout.op or node.op)

    def run(group):
        context = Context(backend=BACKEND, group=group)
        attributes = rule.localized(node.attribute, states, group.rank)
        own = {slot: pieces[group.rank] for slot, pieces in given.items()}
        found = local.forward(own, attributes, context)
        return found["y"], local.vjp(
            wanted, {**own, **found}, {"y": dys[group.rank]}, attributes, context
        )

    found = run_ranks(SIZE, run)
    ys = [y for y, _ in found]
    if isinstance(states["y"], Cut):
        got = torch.zeros_like(expected["y"])
        for rank, y in enumerate(ys):
            states["y"].put(got, y, rank)
    else:
        got = sum(ys) if states["y"] is PART else ys[0]
    torch.testing.assert_close(got, expected["y"], atol=1e-6, rtol=1e-5)
    for slot in wanted:
        state = states[slot]
        is_whole = state is WHOLE and not specs[slot].per_row
        is_summed = not state.is_disjoint if isinstance(state, Cut) else state is COPIED or is_whole
        pieces = [gradient[slot].float() for _, gradient in found]
        if state is FIRST:  # a training pass drops what others give
            pieces = parts_of(pieces[0], FIRST)
        whole_gradient = together(pieces, gradients[slot].shape, state, is_summed=is_summed)
        torch.testing.assert_close(whole_gradient, gradients[slot].float(), atol=1e-5, rtol=1e-5)


def test_what_first_means_is_kept():
    assert [bool(part.any()) for part in parts_of(torch.ones(3), FIRST)] == [True, False]
