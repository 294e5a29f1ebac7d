"""Saved activations: what a rank keeps of each row of a pack between forward and backward."""

from functools import partial
from math import inf

import pytest
import torch
from lengths import long_but
from peft_methods import config_of
from ranks import (
    assert_gradients_agree,
    random_masters,
    relative_error,
    train,
    train_divided,
    whole_backbone,
)
from support import random_sequences, targets_of

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.full import FullConfig
from coserve.graph.division import dividable
from coserve.kernels.groups.threads import run_ranks
from coserve.models import forward, load_backbone
from coserve.models.dividing import divided_backbone
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.blockwise import BlockwisePass
from coserve.tuning.joined import joined_tasklet
from coserve.tuning.programs import frontier_of_part

ALL_LINEAR = LoraConfig(r=16, target_modules="all-linear")
# FLOPs for each byte of a link that costs nothing, and nothing is kept in pieces.
FREE, WHOLE_ROWS = 0.0, None
SMALL = [("llama-biases-tied", 2), ("gpt2", 4), ("gpt-oss", 2), ("qwen3-next", 2)]
FAMILIES = [
    *SMALL,
    ("qwen2", 2),
    ("gptj", 2),
    ("falcon-new", 4),
    ("olmo2", 4),
    ("qwen3-moe", 2),
    ("mixtral", 4),
]
METHODS = ["lora", "dora", "bottleneck", "ia3", "bitfit", "prefix-tuning", "vera"]


def program_of_rank_0(model, size, config=ALL_LINEAR, **settings):
    """Return the program of a block."""
    whole = load_backbone(model, device="meta", dtype="bfloat16")

    def run(group):
        return training_programs(
            Adapter(divided_backbone(whole, group), config), **settings
        ).program[1]

    return run_ranks(size, run)[0]


@pytest.mark.parametrize(
    ("model", "size", "whole", "divided"),
    [
        ("dummy:qwen2.5-0.5b", 2, 0.569, 0.504),
        ("dummy:llama-3.1-8b", 2, 0.588, 0.501),
        ("dummy:llama-3.1-8b", 4, 0.382, 0.252),
    ],
)
def test_a_rank_keeps_its_share_of_what_one_rank_keeps(model, size, whole, divided):
    """The rest are keys of dropout's and LoRA's narrow rows, which all ranks keep."""
    alone = program_of_rank_0(model, 1)
    for link, share in ((WHOLE_ROWS, whole), (FREE, divided)):
        program = program_of_rank_0(model, size, link_flops_per_byte=link)
        found = program.saved_bytes_per_token(torch.bfloat16)
        assert found == program.retention.bytes_per_token
        assert found / alone.saved_bytes_per_token(torch.bfloat16) == pytest.approx(
            share, abs=0.001
        )


def test_the_rows_that_all_ranks_have_are_gathered_in_front_of_the_norms():
    program = program_of_rank_0("dummy:qwen2.5-0.5b", 2)
    assert program.retention.divided == {"x", "attention_residual"}
    order = [step.node.name for step in program.backward]
    for name, norm in (
        ("attention_residual", "post_attention_layernorm"),
        ("x", "input_layernorm"),
    ):
        assert order.index(f"{name}.gather") + 1 == order.index(norm)
        assert program.graph.spec[f"{name}.piece"].shape == (448,)


def test_a_tensor_is_gathered_where_that_takes_less_time_than_it_saves_memory():
    """Bytes times seconds of a pass decide: four ranks have a third less to keep, for a quarter
    more to send at most, so that even the slowest link is worth it.
    """
    for size, link, divides in ((2, 1000, True), (2, 1e5, False), (4, 1e5, True)):
        program = program_of_rank_0("dummy:llama-3.1-8b", size, link_flops_per_byte=link)
        whole = program_of_rank_0("dummy:llama-3.1-8b", size, link_flops_per_byte=WHOLE_ROWS)
        kept, extra = program.retention.bytes_per_token, program.retention.extra_flops_fraction
        assert (
            (kept < whole.retention.bytes_per_token)
            is bool(program.retention.divided)
            is (extra > 0)
            is divides
        )
        assert kept * (1 + extra) <= whole.retention.bytes_per_token


@pytest.mark.parametrize(("model", "size"), [("dummy:qwen2.5-0.5b", 2), ("dummy:llama-3.1-8b", 4)])
def test_what_ranks_only_copy_is_not_kept_twice(model, size):
    """The gradient of lora_A reads the norm's output under the name that it has after
    `rank_copy`."""
    assert (
        program_of_rank_0(model, size, link_flops_per_byte=WHOLE_ROWS).saved
        == program_of_rank_0(model, 1).saved
    )


def test_keeping_less_never_keeps_more_than_what_is_kept_by_itself():
    [plain, small] = [
        program_of_rank_0("dummy:qwen2.5-0.5b", 2, link_flops_per_byte=100, max_recompute=most)
        for most in (0, 1e-4)
    ]
    assert plain.retention.divided
    assert small.retention.bytes_per_token <= plain.retention.bytes_per_token


def test_keys_values_and_what_a_state_needs_are_not_divided():
    local = divided_backbone(
        whole_backbone("qwen3-next"), run_ranks(2, lambda group: group)[0]
    ).local
    for part, divided in local.divided.items():
        found = dividable(divided.graph, divided.states, 2)
        assert not found & {*divided.graph.kv_tensors, *divided.graph.lead_tensors}
        assert not dividable(divided.graph, divided.states, 1)
        assert not isinstance(part, int) or "x" in found


def check(name, size, config):
    """Compare divided rows with whole ones, bit for bit, and both with one rank."""
    whole = whole_backbone(name)
    alone, found = train_divided(whole, config, size, link_flops_per_byte=FREE)
    _, kept_whole = train_divided(whole, config, size, link_flops_per_byte=WHOLE_ROWS)
    assert found.loss == pytest.approx(alone.loss, rel=1e-6)
    assert relative_error(found.logits, alone.logits) < 1e-5
    assert_gradients_agree(found.gradients, alone.gradients)
    for name, gradient in kept_whole.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.parametrize("divided", long_but(*SMALL, of=FAMILIES), ids=str)
def test_divided_rows_train_every_family_as_whole_ones_do(divided):
    """Windows are of 5 rows forward and 7 backward, which neither two nor four ranks divide
    evenly."""
    name, size = divided
    check(name, size, LoraConfig(r=4, alpha=6, target_modules=targets_of(name)))


@pytest.mark.parametrize("method", METHODS)
def test_divided_rows_train_every_method_as_whole_ones_do(method):
    check(
        "opt" if method == "bitfit" else "gptj" if method == "vera" else "qwen2",
        2,
        config_of(method),
    )


@pytest.mark.parametrize("family", long_but("llama", of=["llama", "opt", "qwen3-next"]))
def test_divided_rows_train_the_model_itself_as_whole_ones_do(family):
    def train_with(link):
        def run(group):
            backbone, config = divided_backbone(whole, group), FullConfig()
            weights = FullWeights(backbone, config, config.chosen(backbone.architecture))
            programs = training_programs(weights, link_flops_per_byte=link)
            training = TrainingPass(weights, programs, make_pack(random_sequences((7, 11, 1, 5))))
            run_alone(training, forward_rows=5, backward_rows=7)
            return training.gradients, programs.program[1].retention.divided

        return run_ranks(2, run)[0]

    whole = whole_backbone(family)
    (found, divided), (expected, none) = train_with(FREE), train_with(WHOLE_ROWS)
    assert divided and not none
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("family", long_but("qwen2", of=["qwen2", "gpt2", "olmo2"]))
def test_every_choice_of_what_ranks_keep_gives_the_same_gradients(family):
    """Budgets from all that is read down to the least: tensors are divided, restored and computed
    again in turn."""
    whole, config = whole_backbone(family), LoraConfig(r=4, target_modules=targets_of(family))
    masters = random_masters(whole, config)
    expected = train(whole, config, masters)

    def points(group):
        adapter = Adapter(divided_backbone(whole, group), config)
        programs = training_programs(adapter, link_flops_per_byte=50.0)
        return frontier_of_part(programs, adapter, 1, mean_context_len=9)

    choices = run_ranks(2, points)
    assert choices[0] == choices[1], "ranks choose alike"
    assert len({choice.divided for choice in choices[0]}) > 1
    for choice in choices[0][:: max(1, len(choices[0]) // 8)]:
        _, found = train_divided(
            whole,
            config,
            2,
            link_flops_per_byte=50.0,
            budget_bytes_per_token=choice.bytes_per_token,
        )
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert_gradients_agree(found.gradients, expected.gradients)


def test_packs_of_one_program_run_backward_as_one_on_every_rank():
    """Their pieces are laid side by side and gathered once."""
    whole = whole_backbone("qwen2")
    configs = [LoraConfig(r=4, target_modules="all-linear")] * 2 + [
        BottleneckConfig(reduction_factor=4)
    ]
    masters = [random_masters(whole, config) for config in configs]

    def run(group):
        backbone = divided_backbone(whole, group)
        adapters = [
            Adapter(backbone, config, masters=own)
            for config, own in zip(configs, masters, strict=True)
        ]
        passes = [
            TrainingPass(adapter, training_programs(adapter), make_pack(random_sequences(lengths)))
            for adapter, lengths in zip(adapters, ((9, 4), (3, 8), (7, 5)), strict=True)
        ]
        assert passes[0].programs.program[1].retention.divided
        for training in passes:
            training.finish_window(forward(backbone, [training.next_window(1000)]))
            training.run_loss(1000)
        while going := [training for training in passes if not training.done]:
            fewest = min(training.num_parts_done for training in going)
            joined_tasklet([(each, 5) for each in going if each.num_parts_done == fewest]).run()
        alone = TrainingPass(
            adapters[0], training_programs(adapters[0]), make_pack(random_sequences((9, 4)))
        )
        run_alone(alone, forward_rows=13, backward_rows=5)
        return passes[0].gradients, alone.gradients

    for joined, alone in run_ranks(2, run):
        for name, gradient in alone.items():
            torch.testing.assert_close(
                joined[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())
            )


def test_ranks_agree_on_what_their_link_costs():
    """Each by a clock of its own; one rank has no link."""
    whole = whole_backbone("qwen2")
    found = run_ranks(
        3, lambda group: divided_backbone(whole_backbone("mpt-clipped"), group).link_flops_per_byte
    )
    assert len(set(found)) == 1 and 0 < found[0] < inf
    assert whole.link_flops_per_byte == 0


def test_blocks_of_rows_that_do_not_depend_on_the_plan_are_gathered_too():
    whole, config = whole_backbone("qwen2"), LoraConfig(r=4, target_modules="all-linear")
    masters = random_masters(whole, config)

    def run(group, link):
        adapter = Adapter(divided_backbone(whole, group).deterministic(), config, masters=masters)
        programs = training_programs(adapter, link_flops_per_byte=link)
        training = BlockwisePass(adapter, programs, make_pack(random_sequences((7, 40, 31))))
        while not training.forward_done:
            training.run_window(30)
        while not training.loss_done:
            training.run_loss(30)
        while not training.done:
            training.run_tasklet(30)
        return training.gradients

    found, expected = (run_ranks(2, partial(run, link=link))[0] for link in (FREE, WHOLE_ROWS))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
