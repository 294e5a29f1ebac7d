"""Measurements on tiny models: what each experiment says; nothing here asks how fast anything
was."""

import json
from functools import partial
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support import CONFIGS, make_adapter, make_backbone, model_directory
from typer import Typer
from typer.testing import CliRunner

from coserve.bench import coserve, train
from coserve.bench.baselines import PeftTrainer
from coserve.devices.profiles.kept import profile_path
from coserve.errors import CoserveError
from coserve.kernels.base import Backend
from coserve.models import load_backbone
from coserve.models.weights import weight_tensors
from coserve.tuning.config import TuningConfig
from experiments.many import jobs as many
from experiments.many.__main__ import app as many_app
from experiments.peak_memory import PeakMemory, peak_bytes
from experiments.profile import steps as profile
from experiments.profile.floors import Floors, Work
from experiments.profile.ledger import PARTS, part_of
from experiments.profile.page import profile_html

pytestmark = pytest.mark.long


def test_memory_is_what_is_held_at_once_and_not_what_was_held_before():
    held = torch.zeros(1 << 20)

    def run():
        nonlocal held
        first = torch.zeros(1 << 10)
        del first
        held = torch.zeros(1 << 12)
        return torch.zeros(1 << 12)

    found = peak_bytes(run, torch.device("cpu"))
    assert 4 * 2 * (1 << 12) <= found < 4 * 3 * (1 << 12)


def test_what_is_held_elsewhere_counts_with_what_was_held_at_the_same_time():
    with PeakMemory(torch.device("cpu")) as memory:
        first = torch.zeros(1 << 12)
        first_bytes = first.nbytes
        memory.held_elsewhere(1 << 20)
        del first
        second = torch.zeros(
            1 << 16
        )  # the larger of both: added to what was held elsewhere before, it would be more
        memory.held_elsewhere(1 << 10)
    del second
    assert first_bytes + (1 << 20) <= memory.num_bytes < first_bytes + (1 << 20) + (1 << 12)


def test_many_jobs_at_once_are_compared_with_the_same_work_done_otherwise():
    found = many.run(make_backbone(), runs=1, num_jobs=3, batch=2, steps=2, length=16)
    assert (found["jobs"], found["batch"], found["sequence"]) == (3, 2, 16)
    speeds = [found[name] for name in found if name.endswith("tokens_per_s")]
    assert len(speeds) == 4 and all(speed > 0 for speed in speeds)
    assert 0 <= found["loss_difference"] < 1e-5, "jobs at once learn what they learn alone"
    assert found["memory_bytes"] > 0 and found["peft_memory_bytes"] > 0


def test_many_refuses_numbers_of_jobs_that_learned_something_else(monkeypatch):
    monkeypatch.setattr(many, "_TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(CoserveError, match="off those of their runs alone"):
        many.run(make_backbone(), runs=1, num_jobs=2, batch=1, steps=1, length=8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, when it first compiles
@pytest.mark.parametrize(("compiled", "max_recompute"), [(False, 0.0), (False, 0.5), (True, 0.0)])
def test_training_is_compared_with_peft_as_it_is_and_compiled(compiled, max_recompute, monkeypatch):
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager")
    )  # traced, but no C++ made of it
    backbone, sequences = make_backbone(), (16,)
    found = train.run(
        backbone, runs=1, compiled=compiled, max_recompute=max_recompute, sequences=sequences
    )
    (row,) = found["rows"]
    speeds = {name for name in row if name.endswith("tokens_per_s")}
    asked = [*(["peft_compiled"] if compiled else []), *(["recompute"] if max_recompute else [])]
    assert speeds == {
        "tokens_per_s",
        "peft_tokens_per_s",
        *(f"{name}_tokens_per_s" for name in asked),
    }
    assert all(row[name] > 0 for name in speeds)
    assert row["activation_bytes"] > 0 and row["peft_activation_bytes"] > 0
    assert not max_recompute or 0 < row["recompute_activation_bytes"] < row["activation_bytes"]


def test_comparing_with_others_changes_nothing_of_what_the_model_is_known_by():
    backbone = make_backbone()
    before = profile_path(backbone)
    PeftTrainer(backbone, train.LORA, TuningConfig().optimizer)
    assert profile_path(backbone) == before, "what was measured of the device is found again"


def test_a_profile_s_parts_sum_up_to_the_step_and_stand_beside_floors(tmp_path):
    found = profile.run(make_backbone(), runs=1, streams=2, context=20, rows=24)
    assert [step["step"] for step in found["steps"]] == ["decode", "fused", "backward"]
    for step in found["steps"]:
        assert tuple(step["parts_ms"]) == tuple(step["floor_ms"]) == PARTS
        assert sum(step["parts_ms"].values()) == pytest.approx(step["timed_ms"])
        assert all(spent >= 0 for spent in step["parts_ms"].values())
        assert all(
            step["parts_ms"][part] > 0 for part in ("products", "attention", "head and loss")
        )
        assert step["step_ms"] > 0 and sum(step["floor_ms"].values()) > 0
    decode, fused, backward = (step["parts_ms"] for step in found["steps"])
    assert decode["sampling"] > 0 and fused["sampling"] > 0 and backward["sampling"] == 0
    assert decode["adapters"] == 0 and fused["adapters"] > 0 and backward["adapters"] > 0
    page = profile_html(
        {**found, "model": "m", "dtype": "float32", "machine": "a <CPU>", "date": "2026-11-22"}
    )
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}svg[@role='img']")) == 3
    assert "measured" in page and "floor" in page


def test_every_method_of_a_backend_has_its_part():
    parts = {name: part_of(name) for name in Backend.__abstractmethods__}
    assert set(parts.values()) == set(PARTS) - {"Python", "waiting"}
    assert parts["product"] == parts["int8_input_gradient"] == "products"
    assert (
        parts["add_adapters"]
        == parts["low_rank_product"]
        == parts["low_rank_input_gradient"]
        == "adapters"
    )
    assert parts["dropped"] == "adapters", "of a LoRA with dropout"
    assert parts["draw"] == parts["argmax"] == "sampling"
    assert parts["rms_norm_weight_gradient"] == parts["silu_mul_gradients"] == "elementwise"


def test_floors_are_bytes_read_once_or_flops():
    backbone = make_backbone()
    floors = Floors(make_adapter(backbone))
    few, many_rows = floors.forward([10], 0), floors.forward([10] * 4, 0)
    assert (
        few["products"].bytes
        == many_rows["products"].bytes
        == sum(
            tensor.nbytes for part in range(3) for tensor in weight_tensors(backbone.weights[part])
        )
    )
    assert many_rows["products"].flops == 4 * few["products"].flops
    assert "adapters" not in few and floors.forward([], 8)["adapters"].bytes > 0
    back = floors.backward(8)
    assert back["products"].flops == pytest.approx(8 * few["products"].flops, rel=0.2), (
        "input gradients alone"
    )
    assert Work(flops=100, bytes=10).seconds(flops_per_s=10, bytes_per_s=10) == 10


def test_objectives_of_co_serving_are_set_in_every_turn_and_a_deterministic_engine_ends_too(
    tmp_path,
):
    config = {**CONFIGS["llama"], "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    backbone = load_backbone(f"dummy:{tmp_path}", dtype="float32")
    found = coserve.run(backbone, runs=2, streams=2, seconds=0.6, deterministic=True)
    for each, num_turns in ((found, 2), (found["deterministic"], 1)):
        assert len(each["solo_steps_ms"]) == num_turns, "one of each turn"
        assert each["objective_tpot_ms"] == pytest.approx(2.5 * each["solo_step_ms"])
        assert 0 <= each["attainment"] <= 1 and each["tpot_p99_of_objective"] > 0
        assert each["tuning_only_tokens_per_s"] > 0
    assert found["deterministic"].keys() >= {"cost_decode", "cost_prompt", "cost_training"}


def test_the_command_ends_with_a_line_of_json_for_programs():
    model = f"dummy:{model_directory()}"
    many_jobs = result_of(
        many_app,
        "--model",
        model,
        "--dtype",
        "float32",
        "--runs",
        "1",
        "--jobs",
        "2",
        "--batch",
        "1",
    )
    assert many_jobs.keys() >= {
        *(
            "experiment",
            "model",
            "dtype",
            "weights",
            "runs",
            "machine",
            "date",
            "tokens_per_s",
            "memory_bytes",
        ),
        *(
            "peft_sequential_tokens_per_s",
            "peft_memory_bytes",
            "decode_step_ms",
            "decode_step_adapters_ms",
        ),
    }


def result_of(app: Typer, *arguments: str) -> dict[str, Any]:
    """Return the last line of what an application prints."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
