"""Modelled groups of ranks: collectives where the local graphs have them; products and memory of
one rank."""

import json
from dataclasses import replace

import pytest
from support import model_directory
from typer.testing import CliRunner

from coserve.adapters import Adapter, LoraConfig
from coserve.bench.cells import Bench, CompareConfig
from coserve.bench.places import ModelledPlace, num_parameters
from coserve.cli.main import app
from coserve.devices.messages.jobs import OpenTrainer, TrainerOpened
from coserve.engine.config import EngineConfig
from coserve.errors import BudgetError, UnsupportedModelError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import Backbone, load_backbone
from coserve.scheduling.profile import Curve, Profile
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import A100, A100_40GB, CATALOGUE, Hardware
from coserve.simulate.links import Link, SumTimes
from coserve.simulate.modelled_ranks import ModelledRank, on_ranks
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import TuningConfig
from coserve.tuning.programs import training_programs
from coserve.workloads.traces import TracedRequest

# A collective takes a second, whatever it moves, and all else nothing: profiles count.
SECOND = Link(name="second", times=(SumTimes(num_devices=2, us=((1, 1e6), (1 << 50, 1e6))),))
COUNTING = Hardware(name="counting", flops_per_s=1e40, bytes_per_s=1e40, call_s=0.0, link=SECOND)
# Bytes take time, a call none: a gather takes half of what a sum does.
BYTES = Link(
    name="bytes", times=(SumTimes(num_devices=2, us=((1, 1e-3), (1 << 50, 1e-3 * (1 << 50)))),)
)
LONG = 4096
LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")


def shapes(name: str) -> Backbone:
    return load_backbone(f"dummy:{name}", device="meta", dtype="bfloat16")


def ranks_of(name: str, size: int = 2) -> Backbone:
    return on_ranks(load_backbone(str(model_directory(name)), device="meta", dtype="float32"), size)


def profile_of(backbone: Backbone, link: Link = SECOND) -> Profile:
    return roofline_profile(backbone, replace(COUNTING, link=link))


def same(curve: Curve) -> float:
    """Return the value of a curve that is the same for any number of rows."""
    assert curve.at(1) == pytest.approx(curve.at(LONG))
    return curve.at(1)


@pytest.mark.parametrize(
    ("name", "of_block"),
    [
        ("llama", 2),
        ("gpt-neox", 1),
        ("gptj", 1),
        ("falcon-old", 1),
        ("mixtral", 2),
        ("qwen3.5", 2),
        ("olmo2", 4),
    ],
)
def test_sums_stand_where_the_graphs_of_a_rank_have_them(name, of_block):
    """Of parallel blocks attention and units are added up together; OLMo 2 norms queries and keys
    over all heads."""
    backbone = ranks_of(name)
    profile, num_layers = profile_of(backbone), backbone.architecture.num_layers
    assert (
        same(profile.forward) == same(profile.sums) == pytest.approx(of_block * num_layers + 1)
    ), "the table's, too"
    # Of the first block nobody asks for the gradient of its input, which has a copy, and two norms
    # in OLMo 2.
    backward = same(profile.backward) * profile.job.num_parts
    assert backward == pytest.approx(of_block * num_layers - 1)
    assert same(profile.backward) == same(profile.backward_sums)
    assert same(profile.head) == pytest.approx(1), "the likeliest token of each rank, for rank 0"
    for curve in (profile.sample, profile.mask, profile.score):
        assert same(curve) == pytest.approx(1), "all logits, for rank 0"
    assert same(profile.loss) == pytest.approx(2), (
        "three floats a row for the loss, and the gradient of the rows"
    )
    assert profile.update_s == pytest.approx(1), "gradients of which every rank has a part"


@pytest.mark.parametrize(
    ("name", "of_block"),
    [("llama", 2), ("gpt-neox", 1), ("mixtral", 2), ("qwen3.5", 2), ("olmo2", 4)],
)
def test_backward_passes_gather_what_ranks_save_in_pieces(name, of_block):
    """A tensor that a block saves in pieces is gathered once; the other collectives are those of
    whole rows."""
    backbone = ranks_of(name)
    programs = training_programs(Adapter(backbone, LORA))
    num_gathers = sum(len(programs.program[part].retention.divided) for part in programs.parts)
    assert num_gathers >= backbone.architecture.num_layers, "a block's input at least"
    profile = roofline_profile(backbone, COUNTING, link_flops_per_byte=0.0)
    expected = of_block * backbone.architecture.num_layers - 1 + num_gathers
    assert same(profile.backward) * profile.job.num_parts == pytest.approx(expected)
    assert same(profile.forward) == same(profile_of(backbone).forward), (
        "a forward pass gathers nothing"
    )


@pytest.mark.parametrize(("name", "is_divided"), [("NVLink 3", True), ("slow", False)])
def test_jobs_save_what_the_profile_of_their_device_says(name, is_divided):
    """Where a link is slow, ranks save the rows whole that all of them have; jobs and profiles
    choose alike."""
    rank = on_ranks(shapes("llama-3.1-8b"), 2)
    slow = Link(name="slow", times=(SumTimes(num_devices=2, us=((1, 10.0), (1 << 30, 1e7))),))
    place = ModelledPlace.of_hardware(
        rank, A100 if name == "NVLink 3" else replace(A100, link=slow)
    )
    command = OpenTrainer(
        job="job", config=TuningConfig(), adapter=LORA.to_peft(), mean_context_len=512.0
    )
    opened = place.open(EngineConfig()).device.execute(command)
    assert isinstance(opened, TrainerOpened)
    saved = sum(each.row for group in opened.training[1:] for each in group)
    halved = training_programs(Adapter(rank, LORA)).saved_bytes_per_token(rank.dtype)
    assert saved == place.profile.saved_bytes_per_token
    assert (saved == halved) == is_divided and saved >= halved


def test_what_is_moved_is_as_wide_as_its_tensors():
    backbone = ranks_of("llama")
    profile, width = profile_of(backbone, BYTES), 4 * backbone.architecture.hidden_size
    num_sums = 2 * backbone.architecture.num_layers + 1
    assert profile.sums.at(LONG) == pytest.approx(1e-9 * num_sums * LONG * width)
    assert profile.head.at(LONG) == pytest.approx(1e-9 * LONG * 2 * 8 / 2)
    for curve in (profile.sample, profile.mask, profile.score):
        assert curve.at(LONG) == pytest.approx(
            1e-9 * LONG * 4 * backbone.architecture.vocab_size / 2
        )
    assert profile.loss.at(LONG) == pytest.approx(1e-9 * LONG * (2 * 3 * 4 / 2 + width))
    adapter = Adapter(backbone, LORA)
    summed = sum(4 * adapter.masters[name].numel() for name in adapter.graphs.summed)
    assert 0 < summed < adapter.num_bytes
    assert profile.update_s == pytest.approx(1e-9 * summed)


def test_one_rank_needs_no_link_and_several_do():
    whole = load_backbone(str(model_directory("llama")), device="meta", dtype="float32")
    assert on_ranks(whole, 1) is whole
    alone = roofline_profile(whole, replace(COUNTING, link=None))
    assert (
        alone == roofline_profile(whole, COUNTING)
        and same(alone.sums) == same(alone.backward_sums) == 0
    )
    with pytest.raises(BudgetError, match="counting has no link for 2 ranks"):
        roofline_profile(on_ranks(whole, 2), replace(COUNTING, link=None))
    with pytest.raises(
        UnsupportedModelError, match="heads of attention cannot be divided among 3 ranks"
    ):
        on_ranks(whole, 3).local  # noqa: B018 - read for the error
    with pytest.raises(AssertionError):
        ModelledRank(2).agree(1)


def test_two_ranks_take_half_of_the_products_and_their_sums():
    """Norms and additions, whose rows every rank has whole, are not halved."""
    whole, hardware = shapes("llama-3.1-8b"), replace(A100, call_s=0.0, num_processors=1)
    alone, halved = (roofline_profile(on_ranks(whole, size), hardware) for size in (1, 2))
    for curve, sums in (("forward", "sums"), ("backward", "backward_sums")):
        once, both, moved = getattr(alone, curve), getattr(halved, curve), getattr(halved, sums)
        for rows in (64, 512, LONG):
            assert 0.5 * once.at(rows) < both.at(rows) - moved.at(rows) < 0.6 * once.at(rows), (
                curve,
                rows,
            )
            assert 0 < moved.at(rows) < both.at(rows)
    assert halved.s_per_pair == pytest.approx(alone.s_per_pair / 2)
    assert halved.s_per_key == pytest.approx(alone.s_per_key / 2)
    assert alone.sums.at(512) == 0


def test_key_heads_that_are_fewer_than_ranks_are_copied():
    whole, two, four = (ranks_of("llama", size) for size in (1, 2, 4))
    assert whole.architecture.config.num_key_value_heads == 2
    assert kv_page_bytes(two, 16) == kv_page_bytes(whole, 16) // 2 == kv_page_bytes(four, 16)
    assert profile_of(two).model.kv_bytes_per_key == profile_of(four).model.kv_bytes_per_key


@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_that_of_a_rank(size):
    whole = shapes("llama-3.1-8b")
    rank = on_ranks(whole, size)
    place, alone = ModelledPlace.of_hardware(rank, A100), ModelledPlace.of_hardware(whole, A100)
    assert place.name == f"{size} x A100" and place.backbone is rank
    assert num_parameters(rank) == pytest.approx(num_parameters(whole) / size, rel=1e-4), (
        "norms are whole"
    )
    weights, left = 2 * num_parameters(rank), place.num_pages * kv_page_bytes(rank, 16)
    assert weights + left == pytest.approx(0.9 * A100.memory_bytes, rel=1e-3)
    assert kv_page_bytes(rank, 16) == kv_page_bytes(whole, 16) // size
    assert place.num_pages > size * alone.num_pages, (
        "a rank has fewer bytes of weights, and of every page"
    )
    # The rows that every rank has whole are saved whole: more than a share of what one device
    # saves.
    saved = place.profile.saved_bytes_per_token
    programs = training_programs(Adapter(rank, LORA))
    assert saved == programs.kept_bytes_per_token(rank.dtype)
    assert alone.profile.saved_bytes_per_token / size < saved < alone.profile.saved_bytes_per_token


def test_a_model_that_does_not_fit_one_device_is_served_and_tuned_by_a_group():
    whole = shapes("llama-3.1-70b")
    with pytest.raises(
        BudgetError, match="141 GB of weights, which leaves too little of the 80 GB of A100"
    ):
        ModelledPlace.of_hardware(whole, A100)
    with pytest.raises(
        BudgetError, match=r"71 GB of weights a device, .* 40 GB of each of 2 x A100 40 GB"
    ):
        ModelledPlace.of_hardware(on_ranks(whole, 2), A100_40GB)
    place = ModelledPlace.of_hardware(on_ranks(whole, 4), A100)
    trace = [
        TracedRequest(at_s=0.5 * n, num_prompt_tokens=100, num_output_tokens=10) for n in range(8)
    ]
    played = Bench(place, CompareConfig(policies=(), seconds=5.0)).run(
        "slack", trace, Slo(ttft_s=5.0, tpot_s=0.1)
    )[0]
    assert played.attainment(Slo(ttft_s=5.0, tpot_s=0.1)) == 1 and played.tuning_tokens_per_s > 100


def test_every_device_of_the_catalogue_has_a_link():
    assert all(hardware.link is not None for hardware in CATALOGUE.values())


def test_plans_and_simulations_take_a_number_of_ranks(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:{second:02d}.0,100,10" for second in range(0, 60, 6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = [
        "--trace",
        str(trace),
        "--model",
        "dummy:qwen2.5-0.5b",
        "--hardware",
        "a40",
        "--tensor-parallel",
        "2",
    ]
    page = ["--picture", str(tmp_path / "plan.html"), "--sample", "5"]
    planned = CliRunner().invoke(
        app, ["plan", *options, *page, "--price", "3"], catch_exceptions=False
    )
    result = json.loads(planned.stdout.splitlines()[-1])
    assert result["tensor_parallel"] == 2 and result["place"] == "2 x A40"
    assert result["price_per_device_hour"] == 6, "of a group"
    assert result["model_error"]["measured"]["model"] == "Qwen2.5-0.5B"
    refused = CliRunner().invoke(app, ["plan", *options[:-1], "4", *page])
    assert refused.exit_code and "14 heads of attention cannot be divided among 4 ranks" in str(
        refused.exception
    )
