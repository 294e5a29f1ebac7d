"""Every family equals transformers: whole prompts, chunks, decoding, ragged batches, float32 and
bfloat16."""

from typing import Any

import pytest
import torch
from family_configs import MORE_CONFIGS
from support import (
    CONFIGS,
    FAMILIES,
    make_backbone,
    make_model,
    model_directory,
    random_tokens,
    record_products,
)

from coserve.errors import BudgetError
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.families import families
from coserve.models.weights import weight_tensors

RAGGED = (20, 3, 1, 11)


def run_ragged(backbone, prompts):
    """All prompts whole, in one batch: logits per prompt."""
    sequences = [CachedSequence(backbone, len(prompt)) for prompt in prompts]
    hidden = forward(
        backbone, [seq.extend(prompt) for seq, prompt in zip(sequences, prompts, strict=True)]
    )
    return logits(backbone, hidden).split([len(prompt) for prompt in prompts])


def test_every_family_is_tested():
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)
    assert set(families()) == {config["model_type"] for config in (CONFIGS | MORE_CONFIGS).values()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_ragged_batches_equal_transformers(name):
    model, backbone = make_model(name), make_backbone(name)
    prompts = [random_tokens(n, n) for n in RAGGED]
    for prompt, ours in zip(prompts, run_ragged(backbone, prompts), strict=True):
        with torch.no_grad():
            theirs = model(prompt[None]).logits[0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_prefill_and_decoding_beside_others_equal_transformers(name):
    """Two prompts in chunks that do not fall together, then token by token: the same logits as each
    whole and alone."""
    model, backbone = make_model(name), make_backbone(name)
    first, second = random_tokens(20, 1), random_tokens(13, 2)
    a, b = CachedSequence(backbone, 20), CachedSequence(backbone, 13)
    got_a, got_b = [], []
    for chunk_a, chunk_b in [(7, 4), (6, 1), (1, 3), (5, 1), (1, 4)]:
        spans = [
            a.extend(first[a.length : a.length + chunk_a]),
            b.extend(second[b.length : b.length + chunk_b]),
        ]
        ours = logits(backbone, forward(backbone, spans))
        got_a.append(ours[:chunk_a])
        got_b.append(ours[chunk_a:])
    for tokens, got in ((first, got_a), (second, got_b)):
        with torch.no_grad():
            theirs = model(tokens[None]).logits[0]
        torch.testing.assert_close(torch.cat(got), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_close_as_transformers_is_to_itself(name):
    """The yardstick: how far transformers' bfloat16 logits move between a prompt alone and in a
    padded batch, and from float32."""
    model, exact = make_model(name, torch.bfloat16), make_model(name, torch.bfloat16).float()
    backbone = load_backbone(str(model_directory(name, torch.bfloat16)))
    assert backbone.dtype == torch.bfloat16
    prompts = [random_tokens(n, n) for n in RAGGED]
    ours = torch.cat(run_ragged(backbone, prompts)).float()
    padded = torch.zeros(len(prompts), max(RAGGED), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    with torch.no_grad():
        alone = torch.cat([model(prompt[None]).logits[0] for prompt in prompts]).float()
        batch = model(padded, attention_mask=mask).logits
        truth = torch.cat([exact(prompt[None]).logits[0] for prompt in prompts])
    batched = torch.cat([batch[row, : len(prompt)] for row, prompt in enumerate(prompts)]).float()
    spread = max(
        (alone - batched).abs().max(), (alone - truth).abs().max(), (batched - truth).abs().max()
    )
    assert (ours - truth).abs().max() <= 1.5 * spread
    assert (ours - truth).pow(2).mean() <= 1.5 * max(
        (alone - truth).pow(2).mean(), (batched - truth).pow(2).mean()
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_equals_generate(name):
    model, backbone = make_model(name), make_backbone(name)
    prompt = random_tokens(6, 3)
    theirs = model.generate(
        prompt[None], max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=True
    )[0, 6:]
    sequence, tokens, ours = CachedSequence(backbone, 18), prompt, []
    for _ in range(12):
        row = logits(backbone, forward(backbone, [sequence.extend(tokens)])[-1:])
        row[
            :, model.generation_config.eos_token_id or 0
        ] = -torch.inf  # min_new_tokens forbids the end
        ours.append(int(row.argmax()))
        tokens = torch.tensor(ours[-1:])
    banned = model.generation_config.eos_token_id
    assert banned is None or banned not in ours
    assert ours == theirs.tolist()


def test_a_weight_matrix_is_multiplied_once_for_all_rows_of_a_batch(monkeypatch):
    backbone = make_backbone("llama")
    seen = record_products(monkeypatch)
    run_ragged(backbone, [random_tokens(n, n) for n in RAGGED])
    matrices = [
        tensor
        for part, held in backbone.weights.items()
        for tensor in weight_tensors(held)
        if tensor.ndim == 2 and part != "embed"
    ]
    multiplied = [place for _, weight in seen for place in places(weight)]
    assert len(multiplied) == len(set(multiplied))
    assert set(multiplied) == {place for matrix in matrices for place in places(matrix)}
    assert len(seen) < len(matrices), "weights that read the same rows are multiplied as one"
    assert {rows for rows, _ in seen} == {sum(RAGGED)}


def places(weight):
    """Where its elements lie."""
    numbers = torch.arange(weight.untyped_storage().nbytes() // weight.element_size())
    mine = numbers.as_strided(weight.shape, weight.stride(), weight.storage_offset()).flatten()
    return [(weight.untyped_storage().data_ptr(), number) for number in mine.tolist()]


def test_equal_blocks_share_one_graph():
    graphs = make_backbone("llama").architecture.graphs
    assert graphs[0] is graphs[1] is graphs[2]
    sliding = make_backbone("qwen2-sliding").architecture.graphs
    assert sliding[0] != sliding[1]
    assert sliding[1] is sliding[2]


def test_a_tied_head_is_the_embedding_itself():
    weights: Any = make_backbone("llama-biases-tied").weights
    assert (
        weights["head"]["lm_head.weight"].dense() is weights["embed"]["model.embed_tokens.weight"]
    )


def test_a_sequence_longer_than_its_cache_is_refused():
    sequence = CachedSequence(make_backbone(), 4)
    with pytest.raises(BudgetError, match="5 tokens does not fit its cache of 4"):
        sequence.extend(random_tokens(5, 0))
    assert sequence.length == 0


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite"])
def test_embeddings_in_bfloat16_are_scaled_as_transformers_scales_them(name):
    """Gemma's factor is a number in bfloat16, Granite's one of Python's."""
    model = make_model(name, torch.bfloat16)
    architecture = load_backbone(str(model_directory(name, torch.bfloat16))).architecture
    (node,) = [node for node in architecture.embed().nodes if node.op == "scale"]
    ids, table = random_tokens(200, 1), model.model.embed_tokens
    rows = torch.nn.functional.embedding(ids, table.weight)
    ours = node.operator.forward({"x": rows}, dict(node.attributes), None)["y"]
    theirs = table(ids) * (model.config.embedding_multiplier if name == "granite" else 1)
    assert torch.equal(ours, theirs)
