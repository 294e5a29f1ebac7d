"""`coserve inspect` as a user runs it: the numbers, the tables, and every mistake as one line."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from support import CONFIGS, make_backbone, make_model, model_directory
from transformers import AutoConfig

from coserve.adapters import LoraConfig
from coserve.adapters.methods import method_names
from coserve.bench.conventional import conventional_saved_bytes
from coserve.cli.main import main
from coserve.models.families import build_architecture
from coserve.version import VERSION


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command line."""
    monkeypatch.setattr(sys, "argv", ["coserve", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    output = capsys.readouterr()
    return int(status.value.code or 0), output.out, output.err


@pytest.fixture
def inspect(monkeypatch, capsys):
    def command(*arguments: str) -> dict:
        status, out, err = run(monkeypatch, capsys, "inspect", *arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return command


def test_llama_70b_keeps_less_than_half_of_what_autograd_keeps(inspect):
    """The case of FlexLLM's figure 13: 381 MiB under transformers and PEFT for one block and 1,024
    tokens."""
    report = inspect(
        "dummy:llama-3.1-70b",
        "--adapter",
        "lora",
        "--r",
        "16",
        "--targets",
        "down_proj",
        "--seq",
        "1024",
    )
    assert report["conventional_bytes_per_token"] * 1024 / 2**20 == pytest.approx(381, abs=1)
    conventional = 381 * 2**20 / 1024
    assert report["frontier"][0] == {
        "bytes_per_token": report["saved_bytes_per_token"],
        "extra_flops_fraction": 0.0,
    }, "nothing is recomputed unless a budget says so"
    assert report["saved_bytes_per_token"] <= 0.48 * conventional
    assert report["frontier"][-1]["bytes_per_token"] <= 0.15 * conventional
    cheapest = next(p for p in report["frontier"] if p["bytes_per_token"] <= 0.15 * conventional)
    assert cheapest["extra_flops_fraction"] < 0.28
    assert {"saved_bytes_per_token", "frontier", "memory_bytes"} <= report.keys()


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe-published"])
def test_states_that_training_keeps_are_counted(inspect, name):
    """In each gated delta layer: one at every 64th row, where the layer runs backward, and two that
    change."""
    directory = str(model_directory(name))
    memory = inspect(directory, "--targets", "down_proj,out_proj", "--seq", "200")["memory_bytes"]
    sizes = make_backbone(name).local.state_sizes.values()
    assert memory["states"] == sum(-(-(4 + 2) * 4 * size // 64) * 64 for size in sizes)
    assert "states" not in inspect(str(model_directory("llama")))["memory_bytes"]


def test_the_frontier_falls_in_bytes_and_rises_in_flops(inspect):
    frontier = inspect("dummy:qwen2.5-0.5b", "--targets", "all-linear")["frontier"]
    pairs = list(pairwise(frontier))
    assert len(pairs) > 10
    assert all(a["bytes_per_token"] > b["bytes_per_token"] for a, b in pairs)
    assert all(a["extra_flops_fraction"] < b["extra_flops_fraction"] for a, b in pairs)


def test_the_figures_of_the_benchmark_page(inspect):
    """benchmarks/activation-memory.md, from matrix sizes: attention is 4 × 512.5 × 8,192 FLOPs of a
    row forward, 2.5 times that back."""
    frontier = inspect("dummy:llama-3.1-70b", "--r", "16", "--targets", "down_proj")["frontier"]
    cost = {point["bytes_per_token"]: point["extra_flops_fraction"] for point in frontier}
    q_and_o, k_and_v, mlp, attention = (
        2 * 8192 * 8192,
        2 * 8192 * 1024,
        3 * 8192 * 28672,
        4 * 512.5 * 8192,
    )
    total = 4 * (q_and_o + k_and_v + mlp) + 3.5 * attention
    assert cost[167_968] == pytest.approx(attention / total, rel=0.01)
    assert cost[151_584] == pytest.approx((attention + 2 * 8192 * 8192) / total, rel=0.01)
    assert cost[53_280] == pytest.approx((attention + 4 * 8192 * 28672) / total, rel=0.01)


def test_a_budget_is_kept_and_says_what_it_costs(inspect):
    free = inspect("dummy:smollm2-135m")
    tight = inspect("dummy:smollm2-135m", "--budget", str(free["saved_bytes_per_token"] // 2))
    assert tight["saved_bytes_per_token"] <= free["saved_bytes_per_token"] // 2
    assert tight["extra_flops_fraction"] > free["extra_flops_fraction"] == 0
    states = {row["tensor"]: row["state"] for row in tight["forward"]}
    assert "rematerialized" in states.values()
    assert any(row["instruction"] == "recompute" for row in tight["backward"])
    saved = sum(row["bytes"] for row in tight["forward"] if row["state"] == "saved")
    assert saved == tight["saved_bytes_per_token"]


def test_memory_is_counted_by_component(inspect):
    report = inspect("dummy:smollm2-135m", "--r", "8", "--targets", "q_proj", "--seq", "100")
    parameters = 30 * 8 * (576 + 576)
    memory = report["memory_bytes"]
    assert memory["weights"] == 134_515_008 * 2
    assert (memory["adapter"], memory["gradients"], memory["optimizer"]) == (
        parameters * 6,
        parameters * 4,
        parameters * 8,
    )
    assert memory["activations"] == 100 * memory["activations_per_token"]
    assert memory["workspace"] == 100 * (576 * 2 + 2 * 192 * 4)
    assert report["conventional_memory_bytes"]["activations"] > memory["activations"]


def held_by_autograd(name: str, lora: dict, rows: int) -> int:
    """Bytes that autograd really holds for the blocks of a whole model on the CPU."""
    model = get_peft_model(make_model(name), PeftLoraConfig(task_type="CAUSAL_LM", **lora)).train()
    model.set_attn_implementation("sdpa")
    blocks = model.get_base_model().base_model
    blocks = getattr(blocks, "decoder", blocks)
    for norm in ("norm", "final_layer_norm"):
        if getattr(blocks, norm, None) is not None:
            setattr(blocks, norm, torch.nn.Identity())
    weights = {
        tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
    }
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_base_model().base_model(torch.zeros(1, rows, dtype=torch.int64), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["k_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
    ],
)
def test_what_autograd_keeps_is_what_it_really_holds(name, lora):
    config = AutoConfig.for_model(**{**CONFIGS[name], "attention_dropout": 0.0})
    counted = conventional_saved_bytes(
        build_architecture(config), LoraConfig(r=4, **lora), rows=16, dtype=torch.float32
    )
    assert sum(counted.values()) == held_by_autograd(name, {"r": 4, **lora}, 16)


def test_an_adapter_above_all_blocks_is_told_as_such(monkeypatch, capsys, inspect):
    report = inspect("dummy:smollm2-135m", "--targets", "lm_head")
    assert report["frontier"] == []
    assert report["backward"] == []
    assert report["conventional_memory_bytes"]["activations"] == 0
    _, out, _ = run(monkeypatch, capsys, "inspect", "dummy:smollm2-135m", "--targets", "lm_head")
    assert "No block runs backward" in out


@pytest.mark.parametrize("columns", ["160", "80"])
@pytest.mark.parametrize("name", ["llama", "opt-350m-style"])
def test_the_tables_show_every_tensor_of_a_directorys_model(monkeypatch, capsys, columns, name):
    monkeypatch.setenv("COLUMNS", columns)
    targets = ".*[/x]?(q_proj|fc1)"
    status, out, err = run(
        monkeypatch, capsys, "inspect", str(model_directory(name)), "--targets", targets
    )
    assert (status, err) == (0, "")
    assert targets in out, "what looks like markup is shown as it is"
    assert max(map(len, out.splitlines())) <= int(columns)
    for words in (
        "Forward, block 2",
        "Backward, block 2",
        "saved in all",
        "Memory to train",
        "in all",
        "Keep less",
    ):
        assert words in out


def test_more_tokens_than_the_model_was_made_for_are_remarked(monkeypatch, capsys):
    _, out, _ = run(monkeypatch, capsys, "inspect", str(model_directory("llama")), "--seq", "500")
    assert "made for at most 128 tokens" in out


@pytest.mark.parametrize(
    "name", [name for name in method_names() if name not in ("full", "bitfit", "lora")]
)
def test_other_methods_than_lora_are_shown_too(monkeypatch, capsys, inspect, name):
    report = inspect("dummy:smollm2-135m", "--adapter", name, "--seq", "64")
    assert report["adapter"]["type"] == name and report["conventional_bytes_per_token"] is None
    assert report["memory_bytes"]["adapter"] > 0 and report["saved_bytes_per_token"] > 0
    status, out, err = run(
        monkeypatch, capsys, "inspect", "dummy:smollm2-135m", "--adapter", name, "--seq", "64"
    )
    assert (status, err) == (0, "") and name in out and "not counted" in out


def test_a_setting_changes_what_is_kept(inspect):
    plain = inspect("dummy:smollm2-135m", "--seq", "64")
    dora = inspect("dummy:smollm2-135m", "--seq", "64", "--adapter-setting", "use_dora=true")
    assert dora["saved_bytes_per_token"] > plain["saved_bytes_per_token"]
    assert dora["memory_bytes"]["adapter"] > plain["memory_bytes"]["adapter"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dummy:gpt-5"], "no preset or config.json 'gpt-5'"),
        (
            ["dummy:smollm2-135m", "--targets", "fc1"],
            "'fc1' matches no linear layer of this llama; it has q_proj",
        ),
        (["dummy:smollm2-135m", "--r", "0"], "rank r must be a whole number from 1 to"),
        (["dummy:smollm2-135m", "--r", "x"], "'--r'"),
        (["dummy:smollm2-135m", "--seq", "0"], "'--seq'"),
        (
            ["dummy:smollm2-135m", "--budget", "5"],
            "keeps at least 1920 bytes per token; 5 is not enough",
        ),
        (["dummy:smollm2-135m", "--dtype", "int4"], "dtype 'int4' is not one of auto, float32"),
        (
            ["dummy:smollm2-135m", "--adapter", "lorra"],
            "'lorra' is not supported; supported: bitfit, bottleneck",
        ),
        (
            ["dummy:smollm2-135m", "--adapter", "ia3", "--r", "4"],
            "ia3 has no setting 'r'; it has target_modules",
        ),
        (["dummy:smollm2-135m", "--adapter", "full"], "'full' trains the model's own weights"),
        (
            ["dummy:smollm2-135m", "--adapter", "bitfit"],
            "this llama has no biases for BitFit to train",
        ),
        (
            ["dummy:smollm2-135m", "--adapter-setting", "x"],
            "--adapter-setting 'x' must be KEY=VALUE",
        ),
        (["dummy:smollm2-135m", "--bogus"], "No such option: --bogus; see coserve inspect --help"),
        ([], "Missing argument"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(monkeypatch, capsys, arguments, message):
    status, out, err = run(monkeypatch, capsys, "inspect", *arguments)
    assert status != 0
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_commands_and_their_flags_are_these(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(monkeypatch, capsys, "inspect", "--help")
    flags = {word for word in out.replace("│", " ").split() if word.startswith("--")}
    assert flags == {
        *("--adapter", "--adapter-setting", "--r", "--alpha", "--targets", "--dropout"),
        *("--seq", "--budget", "--dtype", "--tensor-parallel", "--json", "--help"),
    }


def test_the_console_script_runs():
    command = [sys.executable, "-m", "coserve", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{VERSION}\n"


def test_a_look_at_how_ranks_would_divide_a_model(inspect):
    report = inspect("dummy:llama-3.1-70b", "--tensor-parallel", "4")["ranks"]
    assert report["weight_bytes"] / report["whole_weight_bytes"] == pytest.approx(0.25, abs=0.001)
    assert report["kv_bytes_per_token"] == 80 * 2 * 2 * 128 * 2, (
        "two of eight key heads in each of 80 blocks"
    )
    sums = [(each["node"], each["bytes_per_row"]) for each in report["forward"]]
    assert sums == [("self_attn.o_proj.ranks", 2 * 8192), ("mlp.down_proj.ranks", 2 * 8192)]
    assert [each["node"] for each in report["backward"]] == [
        "input_layernorm.copy",
        "post_attention_layernorm.copy",
    ]
    nodes = {node["node"]: node for node in report["nodes"]}
    assert nodes["self_attn.q_proj"]["weights"] == {
        "self_attn.q_proj.weight": "2,048 of 8,192 rows"
    }
    assert nodes["mlp.down_proj.lora_A"]["weights"] == {
        "mlp.down_proj.lora_A.weight": "7,168 of 28,672"
    }
    assert (
        nodes["mlp.down_proj.lora_B"]["gives"] == nodes["mlp.down_proj"]["gives"] == "part of a sum"
    )
    assert "self_attn.q_proj.lora_A.weight" in report["summed"]


def test_a_look_says_what_a_rank_saves_for_the_backward_pass(inspect):
    report = inspect("dummy:llama-3.1-8b", "--tensor-parallel", "4")
    alone, saved = report["saved_bytes_per_token"], report["ranks"]["saved"]
    assert saved["whole_bytes_per_token"] / alone == pytest.approx(0.382, abs=0.001)
    assert saved["divided_bytes_per_token"] / alone == pytest.approx(0.252, abs=0.001)
    gathered = {each["tensor"]: each["bytes_per_row"] for each in saved["gathered"]}
    assert gathered == {"x": 2 * 4096, "attention_residual": 2 * 4096}


def test_a_norm_over_all_ranks_sends_one_number_per_row(inspect):
    report = inspect(str(model_directory("olmo2")), "--tensor-parallel", "2")["ranks"]
    for way in ("forward", "backward"):
        sent = {each["node"]: each["bytes_per_row"] for each in report[way]}
        assert sent["self_attn.q_norm"] == sent["self_attn.k_norm"] == 4


def test_one_rank_has_all_of_a_model(inspect):
    report = inspect("dummy:qwen2.5-0.5b", "--tensor-parallel", "1")["ranks"]
    assert report["weight_bytes"] == report["whole_weight_bytes"]
    assert (
        report["forward"]
        == report["backward"]
        == report["summed"]
        == report["saved"]["gathered"]
        == []
    )
    assert inspect("dummy:qwen2.5-0.5b")["ranks"] is None


def test_the_layout_is_a_table_and_a_refusal_one_line(monkeypatch, capsys):
    status, out, err = run(
        monkeypatch, capsys, "inspect", "dummy:qwen2.5-0.5b", "--tensor-parallel", "2"
    )
    assert (status, err) == (0, "")
    assert "on each of 2 ranks" in out and "part of a sum" in out and "2 collectives" in out
    assert "13,820 where ranks save columns" in " ".join(out.split())
    status, _, err = run(
        monkeypatch, capsys, "inspect", "dummy:qwen2.5-0.5b", "--tensor-parallel", "4"
    )
    assert status and err.count("\n") == 1
    assert (
        "14 heads of attention cannot be divided among 4 ranks; a number of ranks that fits is 1 "
        "or 2 or 7" in err
    )
