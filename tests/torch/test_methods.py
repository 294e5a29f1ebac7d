"""What a bypass may be beyond the methods that there are, and gradients of a block's weights,
against autograd."""

import copy
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from support import (
    make_backbone,
    make_model,
    random_sequences,
    random_tokens,
    summed_loss,
    worst_error,
)

from coserve.adapters import Adapter, AdapterConfig
from coserve.adapters.places import Place, Site
from coserve.graph.bypass import Bypass
from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.ir import GraphBuilder
from coserve.graph.operators.base import AttentionRows, Context
from coserve.graph.program import compile_program
from coserve.graph.rematerialize import Weighing
from coserve.kernels.attention import Segment
from coserve.models import CachedSequence, forward, logits
from coserve.models.base import Architecture, Part
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs


def pass_of(adapter: Adapter, sequences, budget: int | None = None) -> TrainingPass:
    programs = training_programs(adapter, budget_bytes_per_token=budget)
    training = TrainingPass(adapter, programs, make_pack(sequences))
    run_alone(training, forward_rows=7, backward_rows=5)
    return training


def our_logits(adapter: Adapter, tokens: torch.Tensor) -> torch.Tensor:
    sequence = CachedSequence(adapter.backbone, len(tokens), adapter.bypasses())
    hidden = forward(adapter.backbone, [sequence.extend(tokens)])
    return logits(adapter.backbone, hidden, [(len(tokens), adapter.bypasses())])


@dataclass(frozen=True, kw_only=True)
class Method(AdapterConfig):
    """What these have in common: sites by the end of their names."""

    peft_type = "TEST"
    targets: tuple[str, ...] = ()

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        return {
            name: site
            for name, site in architecture.linear_sites.items()
            if name.endswith(self.targets)
        }

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    def to_peft(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Self:
        return cls()


class Difference(Method):
    """y + D x with a whole matrix D: diff pruning before its mask, and LoRA of full rank."""

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        weight = b.parameter("difference.weight", place.outputs, place.inputs)
        return Bypass(
            graph=b.build(
                b.apply("linear", "difference", {"x": b.rows("x", place.inputs), "weight": weight})
            )
        )


class Transform(Method):
    """y + D y: one product that reads the sum that it is added to."""

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        b = GraphBuilder()
        weight = b.parameter("transform.weight", place.outputs, place.outputs)
        y = b.apply("linear", "transform", {"x": b.rows("y", place.outputs), "weight": weight})
        return Bypass(graph=b.build(y))


@pytest.mark.parametrize("method", [Difference, Transform])
@pytest.mark.parametrize("budget", [None, 500])
def test_methods_equal_autograd_through_hooks_on_transformers(method, budget):
    adapter = Adapter(
        make_backbone("qwen3"), method(targets=("o_proj", "down_proj", "q_proj")), seed=2
    )
    model = make_model("qwen3")
    leaves = {name: master.clone().requires_grad_() for name, master in adapter.masters.items()}
    for module in adapter.sites:

        def hook(layer, inputs, y, module=module):
            if method is Difference:
                return y + inputs[0] @ leaves[f"{module}.difference.weight"].T
            return y + y @ leaves[f"{module}.transform.weight"].T

        model.get_submodule(module).register_forward_hook(hook)
    sequences = random_sequences((9, 6))
    for length in (1, 11, 40):
        tokens = random_tokens(length, 1)
        with torch.no_grad():
            torch.testing.assert_close(
                our_logits(adapter, tokens), model(tokens[None]).logits[0], atol=1e-4, rtol=0
            )
    summed_loss(model, sequences).backward()
    theirs = {name: leaf.grad for name, leaf in leaves.items()}
    assert worst_error(pass_of(adapter, sequences, budget).gradients, theirs) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_full_weights_of_a_block_equal_autograd(name):
    """Every weight of a block, by its own name, with the input's gradient: nothing but `asked` is
    different."""
    backbone, model = make_backbone(name), copy.deepcopy(make_model(name))
    graph = backbone.architecture.graphs[1]
    asked = [tensor.name for tensor in graph.with_kind("weight")]
    program = compile_program(
        graph, [*asked, "x"], Weighing(compute_dtype=torch.float32, mean_context_len=5.0)
    )
    torch.manual_seed(0)
    x, grad = torch.randn(9, 32), torch.randn(9, 32)

    block = model.get_submodule(backbone.architecture.prefix(1).rstrip("."))
    leaf = x.clone().requires_grad_()
    positions = torch.arange(9)
    extra = {}
    if backbone.rotary:
        extra["position_embeddings"] = tuple(
            t[None] for t in backbone.rotary[""].angles(positions, torch.float32)
        )
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    output = block(leaf[None], attention_mask=mask, **extra)
    output = output[0] if isinstance(output, tuple) else output
    output.reshape(9, 32).backward(grad)

    constants = backbone.constants(torch.zeros(9, dtype=torch.int64), positions)
    keys, values = (torch.empty(9, graph.spec[t].shape[0]) for t in graph.kv_tensors)
    grads = torch.zeros_like(keys), torch.zeros_like(values)
    segments = [Segment(num_rows=9, num_keys=9)]
    rows = AttentionRows(
        rows=slice(0, 9),
        batch=backbone.backend.prepare_attention(segments, block_tokens=9),
        keys=keys[None],
        values=values[None],
        key_grads=grads[0][None],
        value_grads=grads[1][None],
    )
    context = Context(backend=backbone.backend, attention=(rows,))
    kept = {"x": x}

    def keep(node, current):
        kept.update({t: current[t] for t in node.output.values() if t in program.saved})
        for kv_tensors, tensor in zip(graph.kv_tensors, (keys, values), strict=True):
            if kv_tensors in node.output.values():
                tensor.copy_(current[kv_tensors])

    run_graph(program.graph, {"x": x, **constants}, backbone.weights[1], context, keep)
    accumulators = {weight: torch.zeros(graph.spec[weight].shape) for weight in asked}
    run = BackwardRun(
        program,
        values={**constants, **backbone.weights[1], **kept},
        gradients={graph.outputs[0]: grad},
        accumulators=accumulators,
        context=context,
    )
    run.advance()
    theirs = {weight: block.get_parameter(weight).grad for weight in asked}
    assert worst_error(accumulators | {"x": run.gradient("x")}, theirs | {"x": leaf.grad}) < 1e-5


@pytest.mark.long
def test_the_page_of_methods_shows_what_its_script_finds():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "methods_by_family.py"))
    page = script["PAGE"].read_text()
    assert script["filled"](page) == page
