"""Fused graphs compute what they were made of, by a backend's kernels where there are any."""

from typing import Any

import pytest
import torch
from support import make_adapter, make_backbone, random_sequences
from torch import Tensor

from coserve.graph.execute import run_graph
from coserve.graph.fuse import fuse, fuse_loss, room_name
from coserve.graph.fusions import FUSIONS
from coserve.graph.ir import Graph, GraphBuilder
from coserve.graph.operators.base import Context
from coserve.kernels.plain import PlainBackend
from coserve.kernels.weights import DenseWeight, Int8Weight, Weight, join
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs

ALL = {row.fused for row in FUSIONS}


def block(*, bias: bool = True) -> Graph:
    """The end of a block: a product onto the rows before it, and a gated unit between two
    products."""
    b = GraphBuilder()
    before, x = b.rows("before", 8), b.rows("x", 8)
    middle = b.apply("add", "middle", {"a": before, "b": b.linear("o_proj", x, 8, bias=bias)})
    unit = {
        "gate": b.linear("gate_proj", middle, 12, bias=bias),
        "up": b.linear("up_proj", middle, 12, bias=bias),
    }
    down = b.linear("down_proj", b.apply("silu_mul", "act", unit), 8, bias=bias)
    return b.build(b.apply("add", "y", {"a": down, "b": middle}))


def weights_of(graph: Graph, stored: type[Weight] = DenseWeight) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {
        spec.name: torch.randn(spec.shape, generator=generator)
        for spec in graph.with_kind("weight")
    }
    return {
        name: stored.from_dense(value) if value.ndim == 2 else value
        for name, value in found.items()
    }


def run(graph: Graph, weights: dict[str, Any], **kernels: Any) -> dict[str, Tensor]:
    backend = PlainBackend(torch.device("cpu"))
    backend.fused = kernels
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(5, 8, generator=generator) for name in ("before", "x")}
    run_graph(graph, values, weights, Context(backend=backend))
    return values


def operators(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def test_neighbours_become_one_operator():
    graph = block()
    assert operators(fuse(graph, ALL)) == ["linear_onto", "gated_linear", "linear_onto"]
    assert operators(fuse(graph, {"gated_linear"})) == [
        "linear",
        "add",
        "gated_linear",
        "linear",
        "add",
    ]
    assert fuse(graph, ()) is graph
    assert [node.name for node in fuse(graph, ALL).nodes] == ["middle", "act", "y"], (
        "the last of each"
    )


@pytest.mark.parametrize("stored", [DenseWeight, Int8Weight])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_what_there_is_no_kernel_for_runs_as_what_it_was_made_of(stored, bias, joined):
    graph = block(bias=bias)
    weights = weights_of(graph, stored)
    if joined:
        names = ["gate_proj", "up_proj"]
        own, biases = join(
            [weights[f"{n}.weight"] for n in names], [weights.get(f"{n}.bias") for n in names]
        )
        weights |= {f"{n}.weight": weight for n, weight in zip(names, own, strict=True)}
        weights |= {
            f"{n}.bias": each for n, each in zip(names, biases, strict=True) if each is not None
        }
    asked = []

    def kernel(*given: Any) -> None:
        asked.append(given)

    expected = run(graph, weights)["y"]
    assert torch.equal(run(fuse(graph, ALL), weights)["y"], expected)
    assert torch.equal(
        run(fuse(graph, ALL), weights, linear_onto=kernel, gated_linear=kernel)["y"], expected
    )
    assert len(asked) == (0 if stored is Int8Weight else 2 + joined), (
        "kernels are for floats, gated ones in one piece"
    )


def test_a_kernel_runs_in_place_of_it():
    graph = block()
    weights = weights_of(graph)

    def onto(x: Tensor, weight: Tensor, bias: Tensor, onto: Tensor) -> Tensor:
        return onto + torch.nn.functional.linear(x, weight, bias) + 1

    found = run(fuse(graph, {"linear_onto"}), weights, linear_onto=onto)["y"]
    assert not torch.allclose(found, run(graph, weights)["y"])


@pytest.mark.parametrize("kept", ["o_proj", "gate_proj", "up_proj", "down_proj"])
def test_what_others_read_is_still_made(kept):
    graph = block()
    fused = fuse(graph, ALL, {kept})
    assert kept in fused.producer
    assert len(fused.nodes) == 3 + (2 if kept in ("gate_proj", "up_proj") else 1)
    weights = weights_of(graph)
    assert torch.equal(run(fused, weights)["y"], run(graph, weights)["y"])


def test_what_two_nodes_read_stays():
    b = GraphBuilder()
    x = b.rows("x", 8)
    y = b.linear("proj", x, 8)
    graph = b.build(b.apply("add", "y", {"a": b.apply("add", "z", {"a": x, "b": y}), "b": y}))
    assert fuse(graph, ALL) == graph
    b = GraphBuilder()
    x = b.rows("x", 8)
    output = b.linear("proj", x, 8)
    graph = b.build(b.apply("add", "y", {"a": x, "b": output}), output)
    assert fuse(graph, ALL) == graph, "an output is what was asked for"


def test_both_halves_of_a_gated_unit_read_the_same_rows():
    b = GraphBuilder()
    one, other = b.linear("gate_proj", b.rows("x", 8), 12), b.linear("up_proj", b.rows("z", 8), 12)
    graph = b.build(b.apply("silu_mul", "act", {"gate": one, "up": other}))
    assert fuse(graph, ALL) == graph


@pytest.mark.parametrize("is_read", [False, True])
def test_a_product_and_its_loss_are_one_operator_unless_others_read_the_logits(is_read):
    b = GraphBuilder()
    logits = b.linear("lm_head", b.rows("x", 8), 12)
    targets = b.constant("targets", dtype=torch.int64)
    loss = b.apply("cross_entropy", "loss", {"logits": logits, "targets": targets})
    graph = b.build(loss, *([logits] if is_read else []))
    fused = fuse_loss(graph)
    if is_read:
        assert fused == graph
        return
    [node] = fused.nodes
    assert (node.name, node.op, node.output["logits"]) == ("loss", "linear_cross_entropy", logits)
    weights = {"lm_head.weight": torch.randn(12, 8)}
    given = {"x": torch.randn(5, 8), "targets": torch.arange(5)}
    context = Context(backend=PlainBackend(torch.device("cpu")))
    one, other = dict(given), dict(given)
    run_graph(graph, one, weights, context)
    run_graph(fused, other, weights, context)
    assert torch.equal(one[loss], other[loss])


def attached(*, at: str) -> Graph:
    """Two products of the same rows and their gated unit, with what a LoRA adds to one of them."""
    b = GraphBuilder()
    x, made = b.rows("x", 8), dict[str, str]()
    narrow = b.apply("low_rank", "narrow", {"x": x, "weight": b.parameter("lora_A", 2, 8)})
    changed = b.parameter("lora_B", 12, 2)
    for name in ("gate", "up"):
        made[name] = b.linear(f"{name}_proj", x, 12)
        if name == at:
            change = b.apply("low_rank", "change", {"x": narrow, "weight": changed})
            made[name] = b.apply("add", "sum", {"a": made[name], "b": change})
    return b.build(b.apply("silu_mul", "y", made))


@pytest.mark.parametrize("at", ["gate", "up"])
def test_neighbours_of_what_a_lora_adds_to_run_at_once_with_it(at):
    graph = attached(at=at)
    fused = fuse(graph, {"linear_and_low_rank"})
    assert operators(fused) == [
        "low_rank",
        "linear_and_low_rank",
        "linear_and_low_rank",
        "silu_mul",
    ]
    assert [len(run) for run in fused.runs] == [1, 2, 1]
    weights = weights_of(graph) | {"lora_A": torch.ones(2, 8) / 3, "lora_B": torch.ones(12, 2) / 5}
    expected = run(graph, weights)["y"]
    torch.testing.assert_close(run(fused, weights)["y"], expected)
    both = fuse(graph, {"linear_and_low_rank", "gated_linear"})
    assert operators(both) == ["low_rank", "gated_linear"]
    assert both.nodes[1].input[f"{at}_narrow"] == "narrow" and len(both.nodes[1].input) == 5
    torch.testing.assert_close(run(both, weights)["y"], expected)


def test_what_is_kept_of_a_gated_unit_has_room_in_the_kernel_or_stays():
    graph, ops, kept = (
        attached(at="up"),
        {"linear_and_low_rank", "gated_linear"},
        {"gate_proj", "sum"},
    )
    assert "gated_linear" not in operators(fuse(graph, ops, kept))
    assert "gated_linear" not in operators(fuse(graph, ops, kept, {"sum"}))
    fused = fuse(graph, ops, kept, kept)
    assert fused.nodes[-1].output == {"y": "y", "gate": "gate_proj", "up": "sum"}
    assert fused.nodes[-1].input["up_room"] == room_name("sum") in fused.spec


@pytest.mark.parametrize(
    "lora", [{}, {"dropout": 0.2}, {"use_dora": True}, {"target_modules": ["q_proj", "down_proj"]}]
)
def test_the_gradient_of_a_factor_and_of_its_site_are_one_instruction(lora, monkeypatch):
    """To the last bit what two give, where there is no kernel for these tensors."""
    adapter, asked, found = make_adapter(make_backbone("llama"), **lora), list[Any](), list[Any]()
    kernels: list[dict[str, Any]] = [
        {},
        {"linear_beside_low_rank": lambda *given: asked.append(given)},
    ]
    for fused in kernels:
        monkeypatch.setattr(adapter.backbone.backend, "fused", fused)
        programs = training_programs(adapter)
        training = TrainingPass(
            adapter, programs, make_pack(random_sequences((9, 4))), dropout_seed=1
        )
        run_alone(training, forward_rows=7, backward_rows=5)
        found.append((training, programs.program[1].backward))
    (one, whole), (other, shorter) = found
    assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)
    at_once = [step for step in shorter if step.parts]
    assert bool(at_once) == bool(asked) == ("dropout" not in lora), (
        "a mask comes between the factor and the rows"
    )
    assert all(
        step.node.op == "linear_beside_low_rank" and len(step.parts) == 2 for step in at_once
    )
    assert {step.node.name for step in whole} == {step.node.name for step in shorter}
