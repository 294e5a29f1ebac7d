"""Graphs, their reverse, pruning, compression and programs, on graphs small enough to know the
answer."""

import dataclasses

import pytest
import torch

from coserve.errors import BudgetError, GraphError
from coserve.graph import operators as table
from coserve.graph.bypass import Bypass, attach
from coserve.graph.compress import compress
from coserve.graph.differentiate import differentiate, prune
from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.ir import Graph, GraphBuilder, Node
from coserve.graph.operators.base import Context, Load
from coserve.graph.operators.elementwise import Add
from coserve.graph.program import compile_program
from coserve.graph.rematerialize import Weighing, frontier, keep_least, rematerialize, save_all
from coserve.kernels.plain import PlainBackend

BF16 = Weighing(compute_dtype=torch.bfloat16, mean_context_len=0.0)


CONTEXT = Context(backend=PlainBackend(torch.device("cpu")))


def mlp(activation: str = "silu") -> Graph:
    """x [8] -> up [16] -> activation -> down [8], plus x: the graph of FlexLLM's figure 5."""
    b = GraphBuilder()
    x = b.rows("x", 8)
    h = b.linear("up", x, 16)
    h = b.apply(activation, "act", {"x": h})
    return b.build(b.apply("add", "sum", {"a": x, "b": b.linear("down", h, 8)}))


def lora(inputs: int, outputs: int, rank: int = 2) -> Bypass:
    b = GraphBuilder()
    h = b.apply(
        "linear", "A", {"x": b.rows("x", inputs), "weight": b.parameter("A.weight", rank, inputs)}
    )
    return Bypass(
        graph=b.build(
            b.apply("linear", "B", {"x": h, "weight": b.parameter("B.weight", outputs, rank)})
        )
    )


# -- the graph ------------------------------------------------------------------


def test_equal_graphs_are_equal_and_hash_alike():
    assert mlp() == mlp()
    assert hash(mlp()) == hash(mlp())
    assert mlp("relu") != mlp()


def test_a_builder_refuses_what_makes_no_graph():
    b = GraphBuilder()
    x = b.rows("x", 8)
    with pytest.raises(GraphError, match="declared twice"):
        b.rows("x", 8)
    with pytest.raises(GraphError, match="linear takes x, weight, bias; node y was given x"):
        b.apply("linear", "y", {"x": x})
    with pytest.raises(GraphError, match="no operator 'conv'"):
        b.apply("conv", "y", {"x": x})
    with pytest.raises(GraphError, match="returns z, which nothing makes"):
        b.build("z")


def test_a_graph_refuses_nodes_in_an_order_that_cannot_run():
    graph = mlp()
    with pytest.raises(GraphError, match="node sum reads down before anything made it"):
        dataclasses.replace(graph, nodes=tuple(reversed(graph.nodes)))


def test_a_forward_run_lets_go_of_what_nobody_reads_again():
    values = {"x": torch.randn(3, 8)}
    weights = {"up.weight": torch.randn(16, 8), "down.weight": torch.randn(8, 16)}
    seen: list[set[str]] = []
    run_graph(mlp(), values, weights, CONTEXT, lambda node, current: seen.append(set(current)))
    assert seen == [{"x", "up"}, {"x", "up", "act"}, {"x", "act", "down"}, {"x", "down", "sum"}]
    assert values.keys() == {"sum"}


def test_a_bypass_is_checked_against_its_site():
    with pytest.raises(GraphError, match="no node gate to attach"):
        attach(mlp(), {"gate": lora(8, 16)})
    with pytest.raises(GraphError, match=r"takes x of \(7,\), the site has \(8,\)"):
        attach(mlp(), {"up": lora(7, 16)})
    with pytest.raises(GraphError, match="gives rows of"):
        attach(mlp(), {"up": lora(8, 15)})
    b = GraphBuilder()
    change = Bypass(
        graph=b.build(b.apply("add", "sum", {"a": b.rows("y", 8), "b": b.weight("bias", 8)}))
    )
    with pytest.raises(GraphError, match="reads bias, which the site does not have"):
        attach(mlp(), {"down": change})
    b = GraphBuilder()
    with pytest.raises(GraphError, match="reads the rows x, y and experts of its site, not z"):
        Bypass(graph=b.build(b.apply("scale", "s", {"x": b.rows("z", 8)}, factor=2.0)))


# -- differentiate and prune ------------------------------------------------------


def test_differentiate_gives_every_gradient_there_is():
    backward = differentiate(mlp())
    assert [g.node.name for g in backward.nodes] == ["sum", "down", "act", "up"]
    given = {g.node.input[slot] for g in backward.nodes for slot in g.wanted}
    assert given == {"x", "up", "act", "down", "up.weight", "down.weight"}
    assert set(backward.activations) == {"x", "up", "act"}


def test_pruning_frozen_weights_drops_what_only_they_needed():
    attached = attach(mlp(), {"down": lora(16, 8)}).graph
    asked = ["down.A.weight", "down.B.weight", "x"]
    backward = prune(differentiate(attached), asked)
    given = {g.node.input[slot] for g in backward.nodes for slot in g.wanted}
    assert not given & {"up.weight", "down.weight"}
    assert set(backward.activations) == {"up", "act", "down.A"}, "x was needed for up.weight alone"


def test_pruning_stops_below_the_lowest_parameter():
    attached = attach(mlp(), {"down": lora(16, 8)}).graph
    backward = prune(differentiate(attached), ["down.A.weight", "down.B.weight"])
    assert [g.node.name for g in backward.nodes] == ["sum", "down.sum", "down.B", "down.A"]
    assert set(backward.activations) == {"act", "down.A"}


def test_asking_for_nothing_leaves_nothing():
    backward = prune(differentiate(mlp()), [])
    assert backward.nodes == ()
    assert save_all(backward, BF16).bytes_per_token == 0


def test_asking_for_what_is_not_there_is_an_error():
    with pytest.raises(GraphError, match=r"gradients of nope\.weight"):
        prune(differentiate(mlp()), ["nope.weight"])


def test_a_missing_rule_raises(monkeypatch):
    class Ruleless(Add):
        name = "ruleless"
        needs = {"a": ()}  # noqa: RUF012

    monkeypatch.setitem(table._TABLE, "ruleless", Ruleless())
    b = GraphBuilder()
    x = b.rows("x", 4)
    graph = b.build(b.apply("ruleless", "y", {"a": x, "b": x}))
    with pytest.raises(GraphError, match="ruleless has no gradient rule for b"):
        differentiate(graph)


def test_a_gradient_cannot_be_asked_through_an_operator_without_one():
    b = GraphBuilder()
    x = b.rows("x", 4)
    graph = b.build(b.apply("sign_bits", "y", {"x": x}))
    assert prune(differentiate(graph), ["x"]).nodes == ()


# -- compress -------------------------------------------------------------------


def test_a_relu_nobody_else_reads_is_kept_as_bits():
    attached = attach(mlp("relu"), {"up": lora(8, 16)}).graph
    asked = ["up.A.weight", "up.B.weight", "x"]
    plain = save_all(prune(differentiate(attached), asked), BF16)
    packed = save_all(compress(prune(differentiate(attached), asked)), BF16)
    assert plain.saved == {"x", "up.A", "act"}
    assert packed.saved == {"x", "up.A", "act.sign"}
    assert plain.bytes_per_token - packed.bytes_per_token == 16 * 2 - 16 // 8


def test_a_relu_that_is_kept_anyway_stays_as_it_is():
    attached = attach(mlp("relu"), {"down": lora(16, 8)}).graph
    backward = prune(differentiate(attached), ["down.A.weight", "down.B.weight", "x"])
    assert compress(backward) == backward


# -- rematerialize and programs ---------------------------------------------------


def test_a_restored_tensor_is_not_kept_and_its_reader_waits():
    attached = attach(mlp(), {"down": lora(16, 8)}).graph
    program = compile_program(attached, ["down.A.weight", "down.B.weight", "x"], BF16)
    assert set(program.saved) == {"up", "down.A"}
    assert program.retention.restored == {"act"}
    assert program.retention.extra_flops_fraction == 0
    names = [(step.kind, step.node.name, step.gradients) for step in program.backward]
    assert names.index(("reverse", "act", ("up",))) < names.index(
        ("reverse", "down.A", ("down.A.weight",))
    )


def test_the_frontier_of_a_small_graph_is_the_known_one():
    attached = attach(mlp(), {"down": lora(16, 8)}).graph
    backward = prune(differentiate(attached), ["down.A.weight", "down.B.weight", "x"])
    points = [(sorted(c.saved), c.bytes_per_token) for c in frontier(backward, BF16)]
    # Everything; without A's output (from a restored act: 64 FLOPs); without up, from x (256 FLOPs
    # more); x alone.
    assert points == [(["down.A", "up"], 36), (["up"], 32), (["down.A", "x"], 20), (["x"], 16)]


def test_a_budget_takes_the_cheapest_choice_within_it():
    attached = attach(mlp(), {"down": lora(16, 8)}).graph
    backward = prune(differentiate(attached), ["down.A.weight", "down.B.weight", "x"])
    assert rematerialize(backward, 10**6, BF16) == save_all(backward, BF16)
    assert rematerialize(backward, 33, BF16).bytes_per_token == 32
    with pytest.raises(BudgetError, match="at least 16 bytes per token; 15 is not enough"):
        rematerialize(backward, 15, BF16)


def test_the_least_is_kept_that_these_flops_allow():
    attached = attach(mlp(), {"down": lora(16, 8)}).graph
    backward = prune(differentiate(attached), ["down.A.weight", "down.B.weight", "x"])
    choices = frontier(backward, BF16)
    assert keep_least(backward, 0.0, BF16) == save_all(backward, BF16)
    for choice in choices:
        assert keep_least(backward, choice.extra_flops_fraction, BF16) == choice
        assert keep_least(backward, choice.extra_flops_fraction + 1e-6, BF16) == choice
    assert keep_least(backward, 1.0, BF16) == choices[-1]


def test_a_program_is_data():
    program = compile_program(mlp(), ["up.weight", "down.weight", "x"], BF16)
    assert program == compile_program(mlp(), ["up.weight", "down.weight", "x"], BF16)
    assert all(dataclasses.is_dataclass(step) for step in program.backward)
    assert "recompute" not in {step.kind for step in program.backward}
    assert program.saved_bytes_per_token(torch.bfloat16) == sum(
        program.graph.spec[name].num_bytes(torch.bfloat16) for name in program.saved
    )
    load = Load(rows=10, mean_context_len=0, compute_dtype=torch.bfloat16)
    forward, backward = program.forward_cost(load), program.backward_cost(load)
    matrices = 10 * 2 * 2 * 8 * 16
    assert matrices < forward.flops < 1.5 * matrices
    assert 2 * matrices < backward.flops < 2.5 * matrices


def test_a_program_says_what_each_instruction_frees():
    program = compile_program(mlp(), ["up.weight", "down.weight", "x"], BF16)
    steps = [
        (step.node.name, step.wanted, step.frees, step.frees_gradients) for step in program.backward
    ]
    assert steps == [
        ("sum", ("a", "b"), ("sum",), ("sum",)),
        ("down", ("x",), ("down.weight",), ()),
        ("act", ("x", "y"), (), ("act",)),
        ("down", ("weight",), ("act", "down"), ("down",)),
        ("up", ("x", "weight"), ("up.weight", "x", "up"), ("up",)),
    ]


@pytest.mark.parametrize("stops", [1, 2, 3, 100])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_a_run_can_stop_between_any_two_instructions(stops, activation):
    b = GraphBuilder()
    x = b.rows("x", 8)
    attributes = {"approximate": "none"} if activation == "gelu" else {}
    h = b.apply(activation, "act", {"x": b.linear("up", x, 16)}, **attributes)
    graph = b.build(b.apply("add", "sum", {"a": x, "b": b.linear("down", h, 8)}))
    torch.manual_seed(0)
    weights = {"up.weight": torch.randn(16, 8), "down.weight": torch.randn(8, 16)}
    rows, grad = torch.randn(5, 8), torch.randn(5, 8)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    leaf = rows.clone().requires_grad_()
    hidden = getattr(torch.nn.functional, activation)(leaf @ leaves["up.weight"].T)
    theirs = torch.autograd.grad(
        leaf + hidden @ leaves["down.weight"].T, [leaf, *leaves.values()], grad
    )

    program = compile_program(graph, ["up.weight", "down.weight", "x"], BF16)
    values, kept = {"x": rows}, {"x": rows}

    def keep(node: Node, current) -> None:
        kept.update({name: current[name] for name in program.saved if name in current})

    run_graph(program.graph, values, weights, CONTEXT, keep)
    accumulators = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    run = BackwardRun(
        program,
        values=kept | weights,
        gradients={"sum": grad},
        accumulators=accumulators,
        context=CONTEXT,
    )
    steps = 0
    while not run.advance(stops):
        steps += 1
        assert run.num_instructions_left == len(program.backward) - steps * stops
    for ours, other in zip([run.gradient("x"), *accumulators.values()], theirs, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
