"""Every family divided among ranks gives what one rank gives: logits, and the loss and gradients of
a LoRA."""

import pytest
import torch
from family_configs import MORE_CONFIGS
from lengths import long_but
from ranks import (
    REFUSED,
    assert_gradients_agree,
    cached_logits,
    divided_logits,
    relative_error,
    train_divided,
    whole_backbone,
)
from support import CONFIGS, make_backbone, model_directory, random_tokens, targets_of

from coserve.adapters import LoraConfig
from coserve.devices.profiles.kept import profile_path
from coserve.errors import UnsupportedModelError
from coserve.graph.ir import Graph
from coserve.kernels import names_for
from coserve.kernels.groups.threads import run_ranks
from coserve.kernels.weights import Int8Weight, as_weight
from coserve.memory.tensors.paged_kv import PagedKv, kv_page_bytes
from coserve.memory.tensors.paged_states import num_state_pages
from coserve.models import forward, load_backbone, logits
from coserve.models.dividing import divided_backbone
from coserve.models.weights import weight_tensors

EVERY = [
    (name, size)
    for name in [*CONFIGS, *MORE_CONFIGS]
    for size in (2, 4)
    if (name, size) not in REFUSED
] + [
    ("falcon-alibi", 3),
    ("mpt-clipped", 3),
]
SHORT = [
    ("llama-biases-tied", 2),
    ("gpt2", 4),
    ("falcon-new", 4),
    ("olmo2", 4),
    ("gpt-oss", 2),
    ("qwen3-next", 4),
]


@pytest.mark.parametrize(
    "divided", long_but(*SHORT, ("falcon-alibi", 3), ("phi3", 4), of=EVERY), ids=str
)
def test_divided_logits_are_those_of_one_rank(divided):
    name, size = divided
    whole = whole_backbone(name)
    expected, found = cached_logits(whole), divided_logits(whole, size)
    assert all(torch.equal(each, found[0]) for each in found)
    assert relative_error(found[0], expected) < 1e-5


@pytest.mark.parametrize("divided", long_but(*SHORT, of=EVERY), ids=str)
def test_divided_gradients_of_a_lora_are_those_of_one_rank(divided):
    name, size = divided
    whole = whole_backbone(name)
    alone, found = train_divided(
        whole, LoraConfig(r=4, alpha=6, target_modules=targets_of(name)), size
    )
    assert found.loss == pytest.approx(alone.loss, rel=1e-6)
    assert relative_error(found.logits, alone.logits) < 1e-5
    assert_gradients_agree(found.gradients, alone.gradients)


@pytest.mark.parametrize("kernels", names_for(torch.device("cpu")))
@pytest.mark.parametrize(
    "name", long_but("qwen3", of=["qwen3", "gpt2", "olmo2", "gpt-oss", "qwen3-next"])
)
def test_any_kernels_give_divided_gradients(name, kernels):
    alone, found = train_divided(
        whole_backbone(name, kernels), LoraConfig(r=4, alpha=6, target_modules=targets_of(name)), 2
    )
    assert_gradients_agree(found.gradients, alone.gradients)


@pytest.mark.parametrize(("name", "size"), sorted(REFUSED))
def test_heads_that_ranks_cannot_share_are_refused_by_number(name, size):
    with pytest.raises(
        UnsupportedModelError,
        match=rf"\d heads of (attention|a state) .* among {size} ranks; .* is 1 or",
    ):
        divided_logits(whole_backbone(name), size)


@pytest.mark.parametrize("name", ["llama-biases-tied", "mixtral", "phi3"])
def test_int8_weights_keep_the_scales_of_whole_rows(name):
    whole = load_backbone(
        str(model_directory(name)), dtype="float32", weights="int8", kernels="plain"
    )
    found = divided_logits(whole, 2)
    assert relative_error(found[0], cached_logits(whole)) < 1e-5
    ranks = run_ranks(2, lambda group: divided_backbone(whole, group))
    down = next(name for name in whole.weights[0] if name.endswith("down_proj.weight"))
    pieces = [as_weight(rank.weights[0][down]) for rank in ranks]
    assert all(isinstance(piece, Int8Weight) for piece in pieces)
    assert torch.equal(pieces[0].tensors()[1], pieces[1].tensors()[1]), (
        "both scale as the whole row does"
    )
    assert torch.equal(
        torch.cat([piece.dense() for piece in pieces], -1),
        as_weight(whole.weights[0][down]).dense(),
    )


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied"])
def test_a_rank_holds_its_share_of_the_matrices(name):
    whole = whole_backbone(name)
    ranks = run_ranks(4, lambda group: divided_backbone(whole, group))

    def num_elements(backbone):
        tensors = [
            t for part in backbone.weights.values() for t in weight_tensors(part) if t.ndim > 1
        ]
        return sum(
            tensor.numel() for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values()
        )

    # Key heads are on two ranks each, and the vocabulary of 97 is padded to 100.
    assert num_elements(ranks[0]) < 0.3 * num_elements(whole)


def test_profiles_of_ranks_are_kept_apart(tmp_path):
    whole = whole_backbone("llama")
    paths = run_ranks(2, lambda group: profile_path(divided_backbone(whole, group), tmp_path))
    assert paths[0] == paths[1] != profile_path(whole, tmp_path)


def test_one_rank_runs_the_graphs_of_the_whole_model():
    backbone = whole_backbone("llama")
    assert backbone.local.graphs is backbone.architecture.graphs
    assert all(isinstance(graph, Graph) for graph in backbone.local.graphs.values())


@pytest.mark.parametrize("kernels", names_for(torch.device("cpu")))
@pytest.mark.parametrize("name", ["llama", "olmo2", "qwen3-next"])
def test_divided_requests_keep_their_heads_in_pages(name, kernels):
    """A rank's pages hold its heads, and its states, so that they are smaller, and have the same
    numbers."""
    whole = make_backbone(name, kernels=kernels)
    tables = [(3, 0, 7, 1), (4, 2, 5, 6)]

    def run(backbone):
        num_states = num_state_pages(backbone.local, kv_page_bytes(backbone, 4))
        pages = PagedKv(backbone, num_pages=8 + 2 * num_states, block_tokens=4)
        rows = [
            (
                [*range(8 + index * num_states, 8 + (index + 1) * num_states), *table],
                0,
                random_tokens(length, length).tolist(),
            )
            for index, (table, length) in enumerate(zip(tables, (6, 5), strict=True))
        ]
        first = forward(backbone, [pages.rows(rows)])
        more = [(table, len(tokens), [5 + index]) for index, (table, _, tokens) in enumerate(rows)]
        second = forward(backbone, [pages.rows(more)])
        return torch.cat([logits(backbone, first), logits(backbone, second)]), pages.page_bytes

    expected, page_bytes = run(whole)
    for found, own_bytes in run_ranks(2, lambda group: run(divided_backbone(whole, group))):
        assert relative_error(found, expected) < 1e-5
        assert own_bytes == page_bytes // 2
