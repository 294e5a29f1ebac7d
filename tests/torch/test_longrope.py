"""LongRoPE: one of its two sets of factors holds for all sequences, by how long they may be; on its
side of the original length, transformers gives the same.
"""

from typing import Any

import pytest
import torch
from engines import examples_of
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from support import (
    VOCAB,
    peft_gradients,
    random_sequences,
    random_tokens,
    random_weights_,
    worst_error,
)
from transformers import AutoConfig, AutoModelForCausalLM

from coserve import Engine, EngineConfig, SamplingParams, TuningConfig
from coserve.adapters import load_adapter
from coserve.errors import JobError, ModelError, RequestError, UnsupportedModelError
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.families import build_architecture
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs

ORIGINAL = 16
SCALING: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.3, 1.6],
    "long_factor": [1.5, 4.0, 9.0],
}
CONFIG: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": ORIGINAL,
    "partial_rotary_factor": 0.75,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_scaling": SCALING,
}
# Which sequences may be run, and lengths of that side of the original length, in whole and in
# chunks.
SIDES = pytest.mark.parametrize(
    ("most", "lengths"), [(None, (40, 17, 23)), (ORIGINAL, (16, 1, 9, 5))]
)


def make_model(**changes: Any) -> Any:
    config = AutoConfig.for_model(**{**CONFIG, "rope_scaling": dict(SCALING), **changes})
    return random_weights_(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("longrope")
    make_model().save_pretrained(path)
    return str(path)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens[None]).logits[0]
    return found


@SIDES
def test_ragged_batches_in_chunks_equal_transformers(directory, most, lengths):
    model, backbone = make_model(), load_backbone(directory, dtype="float32", max_positions=most)
    prompts = [random_tokens(n, n) for n in lengths]
    caches = [CachedSequence(backbone, len(prompt)) for prompt in prompts]
    ours: list[list[torch.Tensor]] = [[] for _ in prompts]
    for size in (7, 1, 6, 26):  # across the original length
        spans = [
            (own, cache.extend(prompt[cache.length : cache.length + size]))
            for own, cache, prompt in zip(ours, caches, prompts, strict=True)
            if cache.length < len(prompt)
        ]
        rows = logits(backbone, forward(backbone, [span for _, span in spans]))
        for (own, _), part in zip(
            spans, rows.split([span.num_rows for _, span in spans]), strict=True
        ):
            own.append(part)
    for prompt, got in zip(prompts, ours, strict=True):
        torch.testing.assert_close(torch.cat(got), logits_of(model, prompt), atol=1e-4, rtol=0)


def test_beside_a_long_sequence_transformers_takes_the_long_factors_for_short_ones_too(directory):
    model, backbone = make_model(), load_backbone(directory, dtype="float32")
    prompts = [random_tokens(n, n) for n in (30, 6)]
    padded = torch.stack(
        [torch.nn.functional.pad(prompt, (0, 30 - len(prompt))) for prompt in prompts]
    )
    with torch.no_grad():
        theirs = model(padded).logits
    for prompt, expected in zip(prompts, theirs, strict=True):
        sequence = CachedSequence(backbone, len(prompt))
        got = logits(backbone, forward(backbone, [sequence.extend(prompt)]))
        torch.testing.assert_close(got, expected[: len(prompt)], atol=1e-4, rtol=0)
    assert (logits_of(model, prompts[1]) - theirs[1, :6]).abs().max() > 0.1, (
        "alone, it takes the short ones"
    )


@SIDES
def test_a_lora_has_pefts_gradients(directory, tmp_path, most, lengths):
    settings = PeftLoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_model(), settings)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.save_pretrained(tmp_path)
    adapter = load_adapter(load_backbone(directory, dtype="float32", max_positions=most), tmp_path)
    sequences = random_sequences(lengths)
    training = TrainingPass(adapter, training_programs(adapter), make_pack(sequences))
    run_alone(training, forward_rows=5, backward_rows=7)
    assert worst_error(training.gradients, peft_gradients(model, sequences)) < 1e-4


def test_an_engine_answers_past_the_original_length_as_transformers_does(directory):
    """With a cache that another request of the same prompt has filled."""
    prompt = random_tokens(ORIGINAL + 1, 3)
    with torch.no_grad():
        expected = (
            make_model()
            .generate(prompt[None], max_new_tokens=20, do_sample=False)[0, len(prompt) :]
            .tolist()
        )
    engine = Engine.load(
        directory, EngineConfig(memory_bytes=1 << 22, block_tokens=4), dtype="float32"
    )
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        (answer,) = engine.generate([prompt.tolist()], params)
        assert list(answer.tokens) == expected


def test_an_engine_of_short_sequences_takes_no_longer_ones(directory):
    config = EngineConfig(memory_bytes=1 << 22, block_tokens=4)
    engine = Engine.load(directory, config, dtype="float32", max_positions=ORIGINAL)
    prompt = random_tokens(6, 3)
    with torch.no_grad():
        expected = (
            make_model().generate(prompt[None], max_new_tokens=10, do_sample=False)[0, 6:].tolist()
        )
    (answer,) = engine.generate(
        [prompt.tolist()], SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    )
    assert list(answer.tokens) == expected
    with pytest.raises(RequestError, match="the model has 16 positions"):
        engine.generate([prompt.tolist()], SamplingParams(max_tokens=11))
    with pytest.raises(JobError, match="example 0 has 17 tokens; the model has 16 positions"):
        engine.submit(examples_of([17]), TuningConfig())


def test_more_positions_than_the_model_has_are_refused(directory):
    with pytest.raises(ModelError, match="65 positions are more than the 64 of"):
        load_backbone(directory, max_positions=65)


@pytest.mark.parametrize("wrong", [0, -5, 1.5, True])
def test_positions_that_are_no_number_of_them_are_refused(directory, wrong):
    with pytest.raises(
        ModelError, match=f"max_positions must be a whole number from 1 to 64, not {wrong}"
    ):
        Engine.load(directory, dtype="float32", max_positions=wrong)


@pytest.mark.parametrize("which", ["long_factor", "short_factor"])
@pytest.mark.parametrize("factors", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0], "a", None])
def test_factors_that_do_not_fit_are_refused(which, factors):
    config = make_model().config
    config.rope_parameters[which] = factors
    with pytest.raises(UnsupportedModelError, match="is not valid"):
        build_architecture(config).rotary_tables()
