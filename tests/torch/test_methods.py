"""The methods of the papers (`methods.py`), held against PEFT or autograd."""

import copy

import pytest
import torch
from methods import IA3, Bottleneck, Difference, Prefix, Prompt, Transform, VirtualRows, with_virtual
from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support import make_backbone, make_model, random_sequences, random_tokens, summed_loss, worst_error

from coserve.adapters import Adapter
from coserve.graph import operators
from coserve.graph.execute import BackwardRun, run_graph
from coserve.graph.operators.base import AttentionRows, Context
from coserve.graph.program import compile_program
from coserve.kernels.attention import Segment
from coserve.models import CachedSequence, forward, logits
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


@pytest.mark.parametrize("budget", [None, 500])
def test_ia3_equals_peft(budget):
    config = IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    model = get_peft_model(make_model("llama"), config)
    adapter = Adapter(make_backbone("llama"), IA3(targets=("k_proj", "v_proj")), seed=1)
    vectors = {}
    for name, parameter in model.named_parameters():
        if "ia3_l" in name:
            ours = name.removeprefix("base_model.model.").replace("ia3_l.default", "ia3_l_minus_1")
            parameter.data.copy_(adapter.masters[ours][:, None] + 1)
            vectors[ours] = parameter
    assert vectors.keys() == adapter.masters.keys()
    tokens, sequences = random_tokens(11, 1), random_sequences((9, 6))
    with torch.no_grad():
        torch.testing.assert_close(our_logits(adapter, tokens), model(tokens[None]).logits[0], atol=1e-4, rtol=0)
    summed_loss(model, sequences).backward()
    theirs = {name: parameter.grad.flatten() for name, parameter in vectors.items()}
    assert worst_error(pass_of(adapter, sequences, budget).gradients, theirs) < 1e-5


@pytest.mark.parametrize("method", [Bottleneck, Difference, Transform])
@pytest.mark.parametrize("budget", [None, 500])
def test_methods_equal_autograd_through_hooks_on_transformers(method, budget):
    adapter = Adapter(make_backbone("qwen3"), method(targets=("o_proj", "down_proj", "q_proj")), seed=2)
    model = make_model("qwen3")
    leaves = {name: master.clone().requires_grad_() for name, master in adapter.masters.items()}
    for module in adapter.sites:

        def hook(layer, inputs, y, module=module):
            if method is Difference:
                return y + inputs[0] @ leaves[f"{module}.difference.weight"].T
            if method is Transform:
                return y + y @ leaves[f"{module}.transform.weight"].T
            down, up = leaves[f"{module}.down.weight"], leaves[f"{module}.up.weight"]
            return y + torch.nn.functional.gelu(y @ down.T) @ up.T

        model.get_submodule(module).register_forward_hook(hook)
    sequences = random_sequences((9, 6))
    for length in (1, 11, 40):
        tokens = random_tokens(length, 1)
        with torch.no_grad():
            torch.testing.assert_close(our_logits(adapter, tokens), model(tokens[None]).logits[0], atol=1e-4, rtol=0)
    summed_loss(model, sequences).backward()
    theirs = {name: leaf.grad for name, leaf in leaves.items()}
    assert worst_error(pass_of(adapter, sequences, budget).gradients, theirs) < 1e-5


def test_rows_of_different_methods_share_a_batch():
    backbone = make_backbone("llama")
    adapters = [
        Adapter(backbone, IA3(targets=("k_proj",)), seed=1),
        Adapter(backbone, Bottleneck(targets=("o_proj", "k_proj")), seed=2),
        Adapter(backbone, Difference(targets=("up_proj",)), seed=3),
    ]
    prompts = [random_tokens(4 + i, i) for i in range(3)]
    spans = [
        CachedSequence(backbone, 8, adapter.bypasses()).extend(prompt)
        for adapter, prompt in zip(adapters, prompts, strict=True)
    ]
    rows = forward(backbone, spans).split([len(prompt) for prompt in prompts])
    for adapter, prompt, hidden in zip(adapters, prompts, rows, strict=True):
        torch.testing.assert_close(logits(backbone, hidden), our_logits(adapter, prompt), atol=1e-5, rtol=0)


def peft_losses(model, sequences, num_virtual: int) -> torch.Tensor:
    """Summed loss of trained tokens, with PEFT's virtual tokens in front; logits of virtual rows, if any, are left
    out."""
    loss = torch.zeros(())
    for ids, marks in sequences:
        rows = model(torch.tensor([ids])).logits[0]
        rows = rows[-len(ids) :][:-1]
        each = torch.nn.functional.cross_entropy(rows, torch.tensor(ids[1:]), reduction="none")
        loss = loss + each[torch.tensor(marks[1:])].sum()
    return loss


def without_first(sequences):
    """The first token of a sequence is the target of a virtual row, or of none: leave it out."""
    return [(ids, [False, *marks[1:]]) for ids, marks in sequences]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_prompt_tuning_equals_peft(family):
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(family), config)
    adapter = Adapter(make_backbone(family), Prompt(), seed=1)
    (name,) = adapter.masters
    prompt = model.prompt_encoder["default"].embedding.weight
    prompt.data.copy_(adapter.masters[name])
    tokens, sequences = random_tokens(11, 1), without_first(random_sequences((9, 6)))
    virtual = torch.cat([torch.tensor([-1, -2, -3]), tokens])
    with torch.no_grad():
        torch.testing.assert_close(our_logits(adapter, virtual), model(tokens[None]).logits[0], atol=1e-4, rtol=0)
    peft_losses(model, sequences, 3).backward()
    ours = pass_of(adapter, with_virtual(sequences, 3)).gradients
    assert worst_error(ours, {name: prompt.grad}) < 1e-5


@pytest.mark.parametrize("budget", [None, 300])
def test_prefix_tuning_equals_peft_with_one_operator_more(monkeypatch, budget):
    monkeypatch.setitem(operators._TABLE, "virtual_rows", VirtualRows())
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(make_model("llama"), config)
    adapter = Adapter(make_backbone("llama"), Prefix(), seed=1)
    weight = model.prompt_encoder["default"].embedding.weight  # [virtual tokens, layers × (K, V) × width]
    names = [f"model.layers.{layer}.{node}.prefix" for layer in range(3) for node in ("rope_k", "self_attn.v_proj")]
    weight.data.copy_(torch.cat([adapter.masters[name] for name in names], 1))
    tokens, sequences = random_tokens(11, 1), without_first(random_sequences((9, 6)))
    virtual = torch.cat([torch.tensor([-1, -2, -3]), tokens])
    with torch.no_grad():
        torch.testing.assert_close(our_logits(adapter, virtual)[3:], model(tokens[None]).logits[0], atol=1e-4, rtol=0)
    peft_losses(model, sequences, 3).backward()
    theirs = dict(zip(names, weight.grad.chunk(6, 1), strict=True))
    assert worst_error(pass_of(adapter, with_virtual(sequences, 3), budget).gradients, theirs) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_full_weights_of_a_block_equal_autograd(name):
    """Every weight of a block, by its own name, with the input's gradient: nothing but `asked` is different."""
    backbone, model = make_backbone(name), copy.deepcopy(make_model(name))
    graph = backbone.architecture.graphs[1]
    asked = [tensor.name for tensor in graph.with_kind("weight")]
    program = compile_program(graph, [*asked, "x"], compute_dtype=torch.float32, mean_context_len=5.0)
    torch.manual_seed(0)
    x, grad = torch.randn(9, 32), torch.randn(9, 32)

    block = model.get_submodule(backbone.architecture.prefix(1).rstrip("."))
    leaf = x.clone().requires_grad_()
    positions = torch.arange(9)
    extra = {}
    if backbone.rotary is not None:
        extra["position_embeddings"] = tuple(t[None] for t in backbone.rotary.angles(positions, torch.float32))
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
