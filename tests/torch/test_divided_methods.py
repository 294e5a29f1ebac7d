"""Every PEFT method on a model that is divided among ranks gives what it gives on one rank, without
collectives of its own but for those that it cannot do without.
"""

from collections import Counter

import pytest
import torch
from lengths import covering, long_but
from peft_methods import CASES, config_of
from ranks import (
    assert_gradients_agree,
    random_masters,
    relative_error,
    together,
    train_divided,
    whole_backbone,
)
from support import random_sequences, worst_error

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.full import FullConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.graph.layouts import FIRST, WHOLE
from coserve.kernels import names_for
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.threads import run_ranks
from coserve.models import forward
from coserve.models.dividing import divided_backbone
from coserve.models.shares import piece
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.joined import joined_tasklet, run_losses

EVERY = [(case, family) for case, found in CASES.items() for family in found.families]
EACH_ONCE = covering(EVERY, tuple, together=1)
SHORT = [
    ("lora", "gptj"),
    ("dora", "qwen2"),
    ("ia3", "qwen2"),
    ("vera", "gptj"),
    ("bottleneck", "gptj"),
]
SHORT += [("prefix-tuning", "qwen2"), ("bitfit", "opt"), ("lora-whole", "llama-biases-tied")]
MIXTURES = ["mixtral", "qwen3-moe", "gpt-oss", "qwen3.5-moe", "qwen3-next"]
BACKENDS = long_but("plain", of=names_for(torch.device("cpu")))
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def check(family, config, size=2, kernels="plain"):
    alone, found = train_divided(whole_backbone(family, kernels), config, size)
    assert found.loss == pytest.approx(alone.loss, rel=1e-6)
    assert relative_error(found.logits, alone.logits) < 1e-5
    assert_gradients_agree(found.gradients, alone.gradients)
    return found


@pytest.mark.parametrize("method", long_but(*SHORT, of=EVERY), ids=str)
def test_a_divided_method_trains_as_on_one_rank(method):
    case, family = method
    check(family, config_of(case))


@pytest.mark.long
@pytest.mark.parametrize(("case", "family"), EACH_ONCE)
def test_a_method_divided_among_four_trains_as_on_one_rank(case, family):
    check(family, config_of(case), 4)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", long_but("qwen2", of=["qwen2", "gpt2", "qwen3-next"]))
def test_dropout_drops_the_features_of_the_whole_row(dora, family, kernels):
    targets = (
        "all-linear" if family != "qwen3-next" else ("q_proj", "o_proj", "in_proj_qkvz", "out_proj")
    )
    check(
        family, LoraConfig(r=4, dropout=0.3, use_dora=dora, target_modules=targets), kernels=kernels
    )


@pytest.mark.parametrize(
    "family",
    long_but("gpt-oss", of=["mixtral", "qwen3-moe", "gpt-oss", "qwen3.5-moe", "qwen3-next"]),
)
def test_a_lora_at_experts_is_divided_as_their_matrices_are(family):
    check(family, LoraConfig(r=4, target_modules=("q_proj",), target_parameters=EXPERTS))


def test_loras_at_embeddings_and_head_are_divided():
    check("qwen2", LoraConfig(r=4, target_modules=("q_proj", "embed_tokens", "lm_head")))


def test_the_states_of_a_lora_follow_from_its_site():
    """FlexLLM, section 5.1: column-cut sites cut B's outputs, row-cut ones A's inputs, and neither
    sends anything."""
    whole = whole_backbone("qwen2")
    _, found = train_divided(whole, LoraConfig(r=4, target_modules=("q_proj", "o_proj")), 2)
    q, o = "model.layers.0.self_attn.q_proj.", "model.layers.0.self_attn.o_proj."
    states, summed = found.graphs.states, found.graphs.summed
    assert states[q + "lora_A.weight"] is WHOLE and dim_of(states[q + "lora_B.weight"]) == -2
    assert dim_of(states[o + "lora_A.weight"]) == -1 and states[o + "lora_B.weight"] is WHOLE
    assert [name for name in summed if ".0." in name] == [
        o + "lora_B.weight",
        q + "lora_A.weight",
    ], "in order"


def dim_of(state):
    assert isinstance(state, Cut)
    return state.dim


@pytest.mark.parametrize(
    "case",
    [
        "lora",
        "rslora",
        "dora",
        "ia3",
        "vera",
        "prefix-tuning",
        "bitfit",
        "diff-pruning",
        "bottleneck",
    ],
)
def test_a_method_sends_nothing_of_its_own(case):
    """All of them add what they add before the site's sum, or, a bottleneck, after it."""
    whole = whole_backbone("qwen2")
    _, found = train_divided(whole, config_of(case), 2)
    for training in (True, False):
        graph = found.graphs.by_training[training][0].graph
        counts = Counter(node.op for node in graph.nodes if node.op.startswith("rank_"))
        assert counts == {"rank_copy": 2, "rank_sum": 2}


def test_a_bottleneck_at_a_row_cut_site_comes_after_the_sum():
    _, found = train_divided(whole_backbone("qwen2"), config_of("bottleneck"), 2)
    attached = found.graphs.by_training[True][0]
    assert "self_attn.o_proj.ranks" in attached.bypasses
    assert "self_attn.o_proj.adapter_down.0.weight" in attached.graph.spec, (
        "its parameters keep their names"
    )


@pytest.mark.parametrize(
    "site",
    long_but(
        ("llama", "k_proj", 4),
        ("phi3", "qkv_proj", 4),
        of=[
            ("llama", "k_proj", 4),
            ("phi3", "qkv_proj", 4),
            ("falcon-new", "query_key_value", 4),
            ("falcon-old", "query_key_value", 2),
            ("qwen3-next", "in_proj_qkvz", 4),
        ],
    ),
    ids=str,
)
def test_a_bottleneck_reads_the_heads_that_several_ranks_have_once(site):
    family, module, size = site
    check(family, BottleneckConfig(reduction_factor=4, target_modules=rf".*\.{module}"), size)


@pytest.mark.parametrize(
    ("family", "module"), [("phi3", "qkv_proj"), ("falcon-new-one-norm", "query_key_value")]
)
def test_a_lora_at_a_fused_projection_trains_its_copied_rows_once(family, module):
    """B's rows of query heads are on a rank each, those of key heads on two, which add up."""
    found = check(family, LoraConfig(r=4, target_modules=(module,)), 4)
    cut = [
        name
        for name, state in found.graphs.states.items()
        if isinstance(state, Cut) and not state.is_disjoint
    ]
    assert cut and set(cut) <= set(found.graphs.summed)


def test_a_bias_of_a_row_cut_site_is_the_first_ranks():
    """Other ranks hold zeros and have no gradient, so that an optimizer leaves them alone; see
    `together`."""
    _, found = train_divided(whole_backbone("opt"), config_of("bitfit"), 2)
    assert found.graphs.states["model.decoder.layers.0.fc2.trained_bias"] is FIRST


def test_parameters_that_embeddings_and_head_share_are_divided():
    """Each rank has a part of the gradient from the head, and all of it from the embeddings, which
    counts once.
    """
    config = LoraConfig(r=4, target_modules=("q_proj",), trainable_token_indices=(3, 5))
    found = check("llama-biases-tied", config)
    owner = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert owner in found.graphs.summed and found.graphs.counted_once == (owner,)


@pytest.mark.parametrize(
    "family", long_but("opt", of=("llama-biases-tied", "olmo2", "opt", "gpt2", "qwen3-next"))
)
def test_the_weights_of_a_divided_model_train_as_on_one_rank(family):
    def train(backbone):
        config = FullConfig()
        weights = FullWeights(backbone, config, config.chosen(backbone.architecture))
        training = TrainingPass(
            weights, training_programs(weights), make_pack(random_sequences((7, 11, 1, 5)))
        )
        run_alone(training, forward_rows=5, backward_rows=7)
        return weights, training

    whole = whole_backbone(family)
    weights, alone = train(whole)
    found = run_ranks(2, lambda group: train(divided_backbone(whole, group)))
    graphs = found[0][0].graphs
    gradients = {
        name: together(
            [training.gradients[name] for _, training in found],
            master.shape,
            graphs.states[name],
            is_summed=name in graphs.summed,
        )
        for name, master in weights.masters.items()
    }
    assert worst_error(gradients, alone.gradients) < 1e-5


def test_tasklets_of_two_methods_join_on_every_rank():
    """Their windows are as many on every rank, so that the collectives of their runs meet."""
    whole = whole_backbone("qwen2")
    configs = [
        LoraConfig(r=4, target_modules="all-linear"),
        config_of("ia3"),
        config_of("bottleneck"),
    ]
    masters = [random_masters(whole, config) for config in configs]

    def train(backbone):
        adapters = [
            Adapter(backbone, config, masters=own)
            for config, own in zip(configs, masters, strict=True)
        ]
        packs = [make_pack(random_sequences(lengths)) for lengths in ((9, 4), (3,), (7, 1))]
        passes = [
            TrainingPass(adapter, training_programs(adapter), pack)
            for adapter, pack in zip(adapters, packs, strict=True)
        ]
        for training in passes:
            training.finish_window(forward(backbone, [training.next_window(1000)]))
        while losing := [(training, 4) for training in passes if not training.loss_done]:
            run_losses(losing)
        while going := [training for training in passes if not training.done]:
            fewest = min(training.num_parts_done for training in going)
            joined_tasklet([(each, 5) for each in going if each.num_parts_done == fewest]).run()
        return passes

    alone = train(whole)
    found = run_ranks(2, lambda group: train(divided_backbone(whole, group)))
    for index, lonely in enumerate(alone):
        graphs = found[0][index].adapter.graphs
        gradients = {
            name: together(
                [passes[index].gradients[name] for passes in found],
                value.shape,
                graphs.states.get(name, WHOLE),
                is_summed=name in graphs.summed,
            )
            for name, value in masters[index].items()
        }
        assert worst_error(gradients, lonely.gradients) < 1e-5


@pytest.mark.parametrize("case", long_but("dora", "bitfit", "lora-whole", of=sorted(CASES)))
def test_ranks_begin_with_their_pieces_of_what_one_rank_begins_with(case):
    family = CASES[case].families[0]
    whole = whole_backbone(family)
    alone = Adapter(whole, config_of(case), seed=5)
    ranks = run_ranks(
        2, lambda group: Adapter(divided_backbone(whole, group), config_of(case), seed=5)
    )
    for rank, adapter in enumerate(ranks):
        assert adapter.masters.keys() == alone.masters.keys()
        for name, master in alone.masters.items():
            expected = piece(master, adapter.graphs.states.get(name, WHOLE), rank)
            torch.testing.assert_close(adapter.masters[name], expected, atol=1e-6, rtol=1e-6)


def test_blocks_have_one_piece_of_veras_projections():
    def projections(backbone):
        adapter = Adapter(backbone, config_of("vera"))
        adapter.sync_compute_copy()
        return [adapter.tensors(layer)["self_attn.o_proj.vera_A"] for layer in range(3)]

    whole = whole_backbone("qwen2")
    expected = projections(whole)[0].chunk(2, 1)
    for rank, found in enumerate(
        run_ranks(2, lambda group: projections(divided_backbone(whole, group)))
    ):
        assert (
            torch.equal(found[0], expected[rank]) and len({each.data_ptr() for each in found}) == 1
        )


@pytest.mark.parametrize("family", ["qwen2", "llama-biases-tied"])
def test_prompts_begin_with_rows_of_the_whole_table(family):
    config = PromptTuningConfig(num_virtual_tokens=7, prompt_tuning_init="SAMPLE_VOCAB")
    whole = whole_backbone(family)
    [expected] = Adapter(whole, config, seed=5).masters.values()
    for adapter in run_ranks(
        2, lambda group: Adapter(divided_backbone(whole, group), config, seed=5)
    ):
        [prompt] = adapter.masters.values()
        assert torch.equal(prompt, expected)


def test_doras_norms_are_added_up_in_one_order():
    """One rank's norms have the bits that they had before there were ranks."""
    config = LoraConfig(r=4, use_dora=True, target_modules=("o_proj",))
    adapter = Adapter(whole_backbone("qwen2"), config, seed=5)
    site = adapter.at["model.layers.0.self_attn.o_proj"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"lora_A.weight": (4, site.place.inputs), "lora_B.weight": (site.place.outputs, 4)}
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    a, b = (
        parameters["lora_A.weight"],
        parameters["lora_B.weight"] * config.scaling(site.place.module),
    )
    weight = site.dense_weight
    sums = weight.square().sum(1) + 2 * ((weight @ a.T) * b).sum(1) + ((b @ (a @ a.T)) * b).sum(1)
    [found] = config.derived(site, parameters).values()
    assert torch.equal(found, sums.clamp(min=0).sqrt())
