"""What every family can do, in every form of it: its logits are transformers', on plain and on fast
kernels; a LoRA at the modules that PEFT finds has PEFT's gradients, and goes to PEFT and back; int8
weights give what they stand for.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import examples_of, make_engine
from family_configs import MORE_CONFIGS
from lengths import long_but
from peft import PeftModel
from peft_training import train_by_autograd
from safetensors.torch import load_file
from support import (
    fresh_peft_twin,
    make_adapter,
    make_backbone,
    make_model,
    model_directory,
    peft_gradients,
    random_sequences,
    random_tokens,
    summed_loss,
    targets_of,
    wide_gradients,
    worst_error,
)

from coserve.adapters import Adapter, LoraConfig, load_adapter, save_adapter
from coserve.adapters.base import PEFT_PREFIX
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError
from coserve.kernels import names_for
from coserve.kernels.weights import DenseWeight, Weight
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.stored import Transposed
from coserve.models.weights import weight_tensors
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig, TuningConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out is set to",
    "ignore:Model has `tie_word_embeddings=True`",
)


def transformers_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens[None]).logits[0]
    return found


BACKENDS = long_but("cpu", of=names_for(torch.device("cpu")))


def our_logits(backbone, tokens, bypasses=None):
    sequence = CachedSequence(backbone, len(tokens), bypasses)
    return logits(backbone, forward(backbone, [sequence.extend(tokens)]), [(len(tokens), bypasses)])


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("name", MORE_CONFIGS)
def test_logits_of_ragged_batches_and_chunks_equal_transformers(name, kernels):
    model, backbone = make_model(name), make_backbone(name, kernels=kernels)
    prompts = [random_tokens(n, n) for n in (20, 3, 1, 11)]
    caches = [CachedSequence(backbone, len(prompt)) for prompt in prompts]
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    for size in (
        1,
        7,
        1,
        12,
    ):  # the long ones in chunks, beside others that are whole, and then alone
        spans = [
            (own, cache.extend(prompt[cache.length : cache.length + size]))
            for own, cache, prompt in zip(got, caches, prompts, strict=True)
            if cache.length < len(prompt)
        ]
        rows = logits(backbone, forward(backbone, [span for _, span in spans]))
        for (own, _), part in zip(
            spans, rows.split([span.num_rows for _, span in spans]), strict=True
        ):
            own.append(part)
    for prompt, ours in zip(prompts, got, strict=True):
        torch.testing.assert_close(
            torch.cat(ours), transformers_logits(model, prompt), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("name", MORE_CONFIGS)
def test_a_lora_has_pefts_logits_and_gradients(name, kernels, tmp_path):
    model, _ = fresh_peft_twin(name, target_modules=targets_of(name))
    model.save_pretrained(tmp_path)
    adapter = load_adapter(make_backbone(name, kernels=kernels), tmp_path)
    tokens, sequences = random_tokens(9, 4), random_sequences((7, 11, 1, 5))
    ours = our_logits(adapter.backbone, tokens, adapter.bypasses())
    torch.testing.assert_close(ours, transformers_logits(model, tokens), atol=1e-4, rtol=0)
    theirs, error = peft_gradients(model, sequences), 1e-4
    if adapter.backbone.local.state_sizes:
        # The gradients of a state's decay are sums of large terms that cancel: in float32, PEFT's
        # are off as well.
        error = max(error, 3 * worst_error(theirs, wide_gradients(model, sequences)))
    for budget in (None, 4 * adapter.backbone.architecture.hidden_size * 8):
        programs = training_programs(adapter, budget_bytes_per_token=budget)
        training = TrainingPass(adapter, programs, make_pack(sequences))
        run_alone(training, forward_rows=5, backward_rows=7)
        assert worst_error(training.gradients, theirs) < error
        assert training.sums.loss == pytest.approx(
            float(summed_loss(model, sequences).detach()), rel=1e-5
        )


@pytest.mark.parametrize("name", MORE_CONFIGS)
def test_an_adapter_comes_out_as_it_went_in(name, tmp_path):
    model, adapter = fresh_peft_twin(name, target_modules=targets_of(name))
    save_adapter(adapter, tmp_path / "ours")
    again = load_adapter(adapter.backbone, tmp_path / "ours")
    assert again.config == adapter.config
    assert all(torch.equal(again.masters[each], adapter.masters[each]) for each in adapter.masters)
    other, _ = fresh_peft_twin(name, seed=5, target_modules=targets_of(name))
    other.load_adapter(str(tmp_path / "ours"), "ours")
    other.set_adapter("ours")
    tokens = random_tokens(8, 2)
    torch.testing.assert_close(
        transformers_logits(other, tokens), transformers_logits(model, tokens)
    )


@pytest.mark.parametrize(
    "name", ["gemma2", "falcon-new", "qwen3-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next"]
)
def test_a_job_makes_pefts_adapter(name, tmp_path):
    """Steps of an engine, in packs of one example or several, against autograd and AdamW on PEFT's
    model."""
    lora = LoraConfig(r=3, alpha=6, target_modules=targets_of(name))
    config = TuningConfig(
        num_epochs=2,
        batch_size=3,
        max_pack_tokens=24,
        seed=4,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    examples, engine = examples_of((9, 14, 5, 20, 11)), make_engine(name)
    events = engine.tune(examples, config, adapter=lora, name="mine")
    engine.save_adapter("mine", tmp_path / "ours")

    save_adapter(Adapter(make_backbone(name), lora, seed=config.seed), tmp_path / "start")
    model = PeftModel.from_pretrained(make_model(name), str(tmp_path / "start"), is_trainable=True)
    losses = train_by_autograd(model, examples, config)
    found = [event.loss for event in events if isinstance(event, JobEvent) and event.kind == "step"]
    assert found == pytest.approx(losses, rel=1e-4)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    # AdamW divides by a gradient's own size, so that it also shows in which digit float32 ends.
    error = 3e-4 if name == "qwen3-next" else 1e-4
    for each in ours:
        torch.testing.assert_close(ours[each], theirs[each], atol=error, rtol=0)


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "qwen3.5-moe", "qwen3-next"])
@pytest.mark.parametrize("targets", long_but(EXPERTS, of=[EXPERTS, EXPERTS[:1], EXPERTS[1:]]))
def test_a_lora_at_experts_is_pefts(name, targets, tmp_path):
    model, adapter = fresh_peft_twin(
        name, target_modules=["q_proj"], target_parameters=list(targets)
    )
    assert any("experts" in each for each in adapter.masters)
    tokens, sequences = random_tokens(9, 4), random_sequences((7, 11, 1, 5))
    ours = our_logits(adapter.backbone, tokens, adapter.bypasses())
    torch.testing.assert_close(ours, transformers_logits(model, tokens), atol=1e-4, rtol=0)
    programs = training_programs(adapter)
    training = TrainingPass(adapter, programs, make_pack(sequences))
    run_alone(training, forward_rows=5, backward_rows=7)
    found = adapter.config.to_peft_tensors(training.gradients, adapter.layout)
    theirs = peft_gradients(model, sequences)
    assert (
        worst_error(
            {name.removeprefix(PEFT_PREFIX): value for name, value in found.items()}, theirs
        )
        < 1e-4
    )
    save_adapter(adapter, tmp_path)
    again = load_adapter(adapter.backbone, tmp_path)
    assert all(torch.equal(again.masters[each], adapter.masters[each]) for each in adapter.masters)


def test_experts_that_are_not_there_are_named():
    with pytest.raises(
        AdapterError,
        match=r"'gate.weight' matches nothing of this mixtral; it has mlp.experts.gate_up",
    ):
        Adapter(make_backbone("mixtral"), LoraConfig(target_parameters=("gate.weight",)))
    with pytest.raises(
        AdapterError, match="'experts' matches nothing of this phi3; it has no experts"
    ):
        Adapter(
            make_backbone("phi3"),
            LoraConfig(target_modules=("o_proj",), target_parameters=("experts",)),
        )


@pytest.mark.parametrize(
    "name", long_but("gpt2", "falcon-new", "gemma2", "phi3", "mixtral", "gpt-oss", of=MORE_CONFIGS)
)
def test_int8_weights_give_the_logits_of_what_they_stand_for(name):
    backbone = load_backbone(str(model_directory(name)), dtype="float32", weights="int8")
    model, architecture = make_model(name), backbone.architecture
    parameters = dict(model.named_parameters())
    for module, (part, node) in architecture.linear_sites.items():
        weight = backbone.weights[part][f"{node}.weight"]
        assert isinstance(weight, Weight)
        parameter = parameters.get(f"{module}.weight")
        if parameter is not None:
            parameter.data.copy_(
                architecture.stored_as(f"{module}.weight").views(weight.dense())[0]
            )
    for module, (part, node) in architecture.expert_sites.items():
        weight = backbone.weights[part][f"{node}.weight"]
        assert isinstance(weight, Weight) and weight.tensors()[0].dtype == torch.int8
        is_turned = type(architecture.stored_as(f"{module}.weight")) is Transposed
        parameters[module].data.copy_(weight.dense().mT if is_turned else weight.dense())
    if architecture.tied:
        return  # the table stays as it is, and is the head's twin in transformers
    tokens = random_tokens(10, 1)
    torch.testing.assert_close(
        our_logits(backbone, tokens), transformers_logits(model, tokens), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "qwen3.5-moe", "qwen3-next"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_on_int8_experts_train_as_on_what_these_stand_for(name, backend):
    directory = str(model_directory(name))
    int8 = load_backbone(directory, dtype="float32", weights="int8", kernels=backend)
    exact = {
        part: {
            name: DenseWeight(held.dense()) if isinstance(held, Weight) else held
            for name, held in weights.items()
        }
        for part, weights in int8.weights.items()
    }
    meant = replace(int8, weights=exact)
    sequences, gradients = random_sequences((7, 11, 1, 5)), []
    for backbone in (int8, meant):
        adapter = make_adapter(
            backbone, seed=1, target_modules=("q_proj",), target_parameters=EXPERTS
        )
        training = TrainingPass(adapter, training_programs(adapter), make_pack(sequences))
        run_alone(training, forward_rows=5, backward_rows=7)
        gradients.append(training.gradients)
    assert worst_error(*gradients) < 1e-4


def test_int8_experts_take_a_quarter_of_the_bytes_of_float32():
    directory = str(model_directory("mixtral"))
    sizes = []
    for weights in ("int8", "dense"):
        backbone = load_backbone(directory, dtype="float32", weights=weights)
        experts = [
            backbone.weights[part][f"{node}.weight"]
            for part, node in backbone.architecture.expert_sites.values()
        ]
        sizes.append(
            sum(tensor.nbytes for each in experts for tensor in weight_tensors({"": each}))
        )
    assert 0.25 < sizes[0] / sizes[1] < 0.3, "and a scale for each row, of rows that are short here"
