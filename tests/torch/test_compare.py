"""`python -m experiments.compare`: what it says of policies on a modelled device, and on torch."""

import importlib.util
import json
import os
import re
import signal
import subprocess
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from coserve.bench.cells import Bench, Cell, CompareConfig, fitting_factor
from coserve.bench.machine import own_cores
from coserve.bench.open_loop import OpenLoop
from coserve.bench.places import ModelledPlace, TorchPlace
from coserve.engine.config import EngineConfig
from coserve.errors import BudgetError, CoserveError, DataError
from coserve.models import load_backbone
from coserve.models.backbone import Backbone
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.policies import policy_names
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import A40, CATALOGUE, Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.workloads.arrivals import LogNormalLengths, poisson
from coserve.workloads.traces import TracedRequest, rescale
from experiments.compare.__main__ import app
from experiments.compare.comparison import Compared, compare
from experiments.compare.page import compare_html
from experiments.compare.separate import Ended, SeparateProcesses

pytestmark = pytest.mark.long

TRACE = poisson(
    rate=4,
    seconds=60,
    seed=0,
    lengths=LogNormalLengths(mean_prompt_tokens=200, mean_output_tokens=30),
)
SLO = Slo(ttft_s=5.0, tpot_s=0.5)
# A step takes some 80 ms there, so that a minute of the trace is not many steps.
SLOW = Hardware(
    name="slow", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5, memory_bytes=4 * 10**9
)


@pytest.fixture(scope="module")
def place() -> ModelledPlace:
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    return ModelledPlace.of_hardware(backbone, SLOW)


def play(
    place: ModelledPlace, trace, *, seconds: float, policy: str = "slack", drain_s: float = 10.0
):
    engine = place.open(EngineConfig(policy=policy))
    loop = OpenLoop(
        engine, trace, slo=SLO, seconds=seconds, idle=lambda pause_s: place.idle(engine, pause_s)
    )
    played = loop.run(drain_s=drain_s)
    engine.check_integrity()
    return played


def test_every_request_is_answered_with_the_traces_lengths(place):
    played = play(place, TRACE[:12], seconds=40.0)
    assert [each.index for each in played.outcomes] == list(range(12))
    for outcome, request in zip(played.outcomes, TRACE, strict=False):
        assert outcome.error is None and outcome.num_output_tokens == request.num_output_tokens
        assert outcome.arrival_s == request.at_s < outcome.end_s
        assert len(outcome.gaps_s) == request.num_output_tokens - 1
    assert played.attainment(SLO) == 1 and played.num_trained == 0
    assert played.num_output_tokens <= sum(request.num_output_tokens for request in TRACE[:12])


def test_requests_that_come_during_the_last_step_are_answered_too(place):
    long = TracedRequest(at_s=0.0, num_prompt_tokens=2000, num_output_tokens=2)
    alone = play(place, [long], seconds=0.1)
    step_s = alone.outcomes[0].ttft_s
    others = [
        TracedRequest(at_s=share * step_s, num_prompt_tokens=20, num_output_tokens=2)
        for share in (0.5, 0.6, 0.9)
    ]
    played = play(place, [long, *others], seconds=0.7 * step_s)
    assert [each.index for each in played.outcomes] == [0, 1, 2], (
        "the last comes after the trace's end"
    )
    assert all(each.error is None for each in played.outcomes)


def test_what_is_not_answered_in_time_held_nothing(place):
    played = play(place, TRACE[:4], seconds=3.0, policy="tuning-only", drain_s=6.0)
    assert {each.error for each in played.outcomes} == {"not answered in time"}
    assert played.attainment(SLO) == 0
    huge = TracedRequest(at_s=0.0, num_prompt_tokens=16 * place.num_pages + 1, num_output_tokens=1)
    (outcome,) = play(place, [huge], seconds=1.0).outcomes
    assert outcome.error is not None and "tokens" in outcome.error


def test_what_is_cut_off_is_judged_by_its_pace_until_then(place):
    long = TracedRequest(at_s=0.0, num_prompt_tokens=100, num_output_tokens=1000)
    (outcome,) = play(place, [long], seconds=5.0, drain_s=0.0).outcomes
    assert outcome.error is None and 10 < outcome.num_output_tokens < 100
    assert outcome.attained(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s)
    assert play(place, [long], seconds=5.0, drain_s=0.0, policy="tuning-only").outcomes == [], (
        "it may still be in time"
    )


def test_policies_are_compared_at_rates_up_to_what_requests_alone_can_hold(place):
    policies = ("slack", "inference-only", "tuning-only")
    found = compare(place, TRACE, CompareConfig(policies=policies, seconds=6.0))
    result = found.result()
    assert result["slo_tpot_ms"] == pytest.approx(2.5 * result["solo_step_ms"], rel=1e-3)
    assert [(row["load"], row["policy"]) for row in result["rows"]] == [
        (load, policy) for load in ("light", "middle", "heavy") for policy in policies
    ]
    for row in result["rows"]:
        assert (row["tuning_tokens_per_s"] > 0) is (row["policy"] != "inference-only")
        assert (row["attainment"] == 0) is (row["policy"] == "tuning-only")
    rates = sorted({row["rate"] for row in result["rows"]})
    assert rates == pytest.approx(
        [share * result["saturation_rate"] for share in (0.3, 0.6, 0.9)], rel=1e-3
    )
    assert [each["attainment"] >= 0.99 for each in result["against_rivals"]] == [True] * 3
    first = found.cells[0]
    again = compare(
        place, TRACE, CompareConfig(policies=("slack",), seconds=6.0, rates=(first.rate,))
    ).cells[0]
    assert {**again.row(), "load": "light"} == first.row(), "the same seed, the same numbers"
    page = compare_html(
        {"model": "m", "dtype": "d", "machine": "a<b", "date": "x", "settings": {"a": 1}}, [found]
    )
    assert (
        len(
            ElementTree.fromstring(page.split("\n", 1)[1]).findall(
                ".//{http://www.w3.org/2000/svg}svg"
            )
        )
        >= 6
    )


def test_a_variant_of_the_default_policy_is_no_rival(place):
    policies = ("slack", "vtc", "slack:divides=false", "token-fusion", "inference-only")
    found = compare(place, TRACE, CompareConfig(policies=policies, seconds=6.0, loads=("light",)))
    (against,) = found.result()["against_rivals"]
    ours, fused = (
        next(cell for cell in found.cells if cell.policy == policy).played.tuning_tokens_per_s
        for policy in ("slack", "token-fusion")
    )
    assert against["best_rival"] == "token-fusion"
    assert against["ratio"] == pytest.approx(ours / fused, rel=1e-3)


def test_packs_are_of_one_example_where_a_policy_runs_whole_passes(place):
    """Requests wait for the ends of these, so that larger packs would make a rival late for
    nothing."""
    config = CompareConfig(policies=(), seconds=0.5, batch=4, sequence=300)
    sizes = {}
    for policy in (*policy_names(), "temporal-sharing:n=64"):
        _, engine = Bench(place, config).run(policy, TRACE[:1], SLO)
        sizes[policy] = max(job.config.pack_tokens for job in engine.jobs.values())
    whole = {
        "temporal-sharing",
        "temporal-sharing:n=64",
        "dynamic-temporal-sharing",
        "fineinfer",
        "chunked-training",
    }
    assert sizes == {policy: 300 if policy in whole else 1024 for policy in sizes}


def test_a_model_says_what_was_measured_where_steps_are_not_as_profiled(place):
    """The device that is here takes other times than its profile says, of windows alone:
    corrections of the forward pass as a whole would not do.
    """
    true = LatencyModel(place.profile)
    for _ in range(40):
        for rows in (1 << bit for bit in range(10)):
            seconds = true.corrections.of("forward", rows, True)
            true.corrections.observe("forward", rows, True, predicted_s=seconds, measured_s=1.5)
    real = replace(place, true=true.as_seen(), noise=0.0)
    config = CompareConfig(policies=("slack",), seconds=10.0, num_jobs=1)
    slo = Slo(ttft_s=5.0, tpot_s=0.3)

    def tokens_per_s(there: ModelledPlace) -> tuple[float, LatencyModel]:
        played, engine = Bench(there, config).run("slack", TRACE[:20], slo)
        return played.tuning_tokens_per_s, engine.latency

    measured, learned = tokens_per_s(real)
    modelled, _ = tokens_per_s(replace(place, true=learned.as_seen(), noise=0.0))
    profiled, _ = tokens_per_s(replace(place, noise=0.0))
    assert modelled == pytest.approx(measured, rel=0.05)
    assert abs(profiled - measured) > 0.1 * measured


def test_the_burst_is_drawn_without_jobs_alone(place):
    found = compare(
        place, TRACE, CompareConfig(policies=("tuning-only", "slack"), seconds=4.0, rates=(2.0,))
    )
    page = compare_html(
        {"model": "m", "dtype": "d", "machine": "m", "date": "x", "settings": {}}, [found]
    )
    assert page.count("A burst: fine-tuning meanwhile") > 0


def test_lengths_are_made_to_fit_and_what_cannot_be_held_is_said(place):
    assert fitting_factor(TRACE, place.latency, 5.0) == 1
    short = fitting_factor(TRACE, place.latency, 1.0)
    assert short < 1 and place.latency.prompt_s(round(800 * short)) <= 1
    with pytest.raises(BudgetError, match="do not hold a TTFT of 5 s and a TPOT of 1e-05 ms"):
        compare(place, TRACE, CompareConfig(policies=("slack",), seconds=1.0, tpot_s=1e-8))
    with pytest.raises(
        BudgetError, match="66 GB of weights, which leaves too little of the 48 GB of A40"
    ):
        ModelledPlace.of_hardware(
            load_backbone("dummy:qwen2.5-32b", device="meta", dtype="bfloat16"), A40
        )


def command_of(tmp_path: Path, *arguments: str) -> list[str]:
    trace = tmp_path / "trace.csv"
    rows = [f"{each.at_s},{each.num_prompt_tokens},{each.num_output_tokens}\n" for each in TRACE]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    return [
        "--trace",
        str(trace),
        "--picture",
        str(tmp_path / "page.html"),
        *arguments,
    ]


def run_command(tmp_path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, command_of(tmp_path, *arguments), catch_exceptions=False)


def plain(text: str) -> str:
    """Without the frames and line breaks of a terminal."""
    return " ".join(text.replace("│", "").split())


def test_the_command_on_several_modelled_devices_ends_with_a_line_of_json(tmp_path):
    data = tmp_path / "set.jsonl"
    data.write_text(json.dumps({"question": "What is 1+1?", "answer": "2"}) + "\n")
    options = (
        "--seconds",
        "2",
        "--rates",
        "2,3",
        "--policies",
        "slack,temporal-sharing:n=64",
        "--data",
        str(data),
    )
    done = run_command(tmp_path, "--device", "modelled", "--hardware", "a100,rtx3090", *options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["place"], row["rate"], row["policy"]) for row in rows] == [
        (place, rate, policy)
        for place in ("A100", "RTX 3090")
        for rate in (2, 3)
        for policy in ("slack", "temporal-sharing:n=64")
    ]
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    for name in ("torch", "transformers", "peft"):
        assert (
            f"{name} {version(name)}"
            in json.loads(done.stdout.splitlines()[-1])["settings"]["versions"]
        )
        assert f"{name} {version(name)}" in page


def test_a_policy_may_run_with_several_settings_beside_all_others(tmp_path):
    variants = ("temporal-sharing:n=64", "temporal-sharing:n=512")
    options = ("--seconds", "1", "--rates", "2", "--policies", ",".join(("all", *variants)))
    done = run_command(tmp_path, "--device", "modelled", *options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["policy"] for row in rows] == [*policy_names(), *variants]


def test_a_report_that_cannot_be_written_loses_nothing(tmp_path):
    """Where that is known it is said before anything runs, and otherwise after all has been
    told."""
    options = ("--device", "modelled", "--seconds", "1", "--rates", "2", "--policies", "slack")
    page = tmp_path / "none" / "page.html"
    done = run_command(tmp_path, *options, "--picture", str(page))
    assert done.exit_code == 2 and "cannot be written (No such file or directory)" in plain(
        done.output
    )
    assert "a decode step" not in done.output, "nothing has run"
    page.parent.mkdir()
    full = Path("/dev/full")
    if full.exists():
        done = CliRunner().invoke(app, command_of(tmp_path, *options, "--picture", str(full)))
        assert isinstance(done.exception, CoserveError) and "cannot be written to /dev/full" in str(
            done.exception
        )
        assert json.loads(done.stdout.splitlines()[-1])["rows"]
    done = run_command(tmp_path, *options, "--picture", str(page))
    assert done.exit_code == 0 and page.exists()


def test_slices_of_a_trace_are_played_one_at_a_time(tmp_path):
    trace = tmp_path / "slices.csv"
    rows = [
        f"{name},{at_s},50,5\n"
        for name, at_s in (("a", 1), ("a", 2), ("b", 9_000_000), ("b", 9_000_001))
    ]
    trace.write_text("slice,timestamp_s,request_tokens,response_tokens\n" + "".join(rows))
    options = (
        "--device",
        "modelled",
        "--seconds",
        "1",
        "--rates",
        "2",
        "--policies",
        "slack",
        "--trace",
        str(trace),
    )
    done = CliRunner().invoke(app, command_of(tmp_path, *options))
    assert isinstance(done.exception, DataError) and "choose one, with --where slice=a" in str(
        done.exception
    )
    done = run_command(tmp_path, *options, "--where", "slice=b")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["settings"]["trace"] == f"{trace} slice=b"


def test_it_is_said_where_separate_processes_cannot_run(tmp_path, monkeypatch):
    """Who finds no rivals in the rows is to know why."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "peft" else found(name, *rest),
    )
    options = ("--seconds", "1", "--rates", "4", "--policies", "slack", "--length-factor", "0.1")
    done = run_command(tmp_path, "--model", "tiny", "--dtype", "float32", *options)
    assert done.exit_code == 0, done.output
    assert "separate processes do not run beside the policies: PEFT" in plain(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    assert "not installed (pip install peft)" in result["settings"]["separate processes"]
    assert "not installed (pip install peft)" in (tmp_path / "page.html").read_text()


def test_several_processes_come_to_what_one_does(place):
    config = CompareConfig(policies=("slack", "tuning-only"), seconds=2.0, rates=(2.0, 3.0))
    said: list[str] = []
    alone, apart = (
        compare(place, TRACE, config, workers=workers, watch=said.append) for workers in (1, 2)
    )
    assert apart.result() == alone.result() and len(alone.cells) == 4
    assert said[-1] == "tuning-only, 3/s: 3 requests/s"


def test_on_torch_the_model_stands_beside_what_was_measured(tmp_path):
    options = (
        "--seconds",
        "1",
        "--rates",
        "4",
        "--policies",
        "slack,tuning-only",
        "--length-factor",
        "0.1",
    )
    done = run_command(tmp_path, "--model", "tiny", "--dtype", "float32", "--no-separate", *options)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["policy"] for row in result["rows"]] == ["slack", "tuning-only"]
    assert all(row["modelled"]["tuning_tokens_per_s"] > 0 for row in result["rows"])
    assert result["model_error"]["tuning_tokens_per_s"] >= 0
    assert {"attainment", "ttft_p99_ms", "tpot_p99_ms", "inference_tokens_per_s"} <= result["rows"][
        0
    ].keys()


def test_in_a_hurry_few_policies_are_compared_at_one_rate(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.compare.__main__._QUICK_MINUTES", 1.0)
    done = run_command(tmp_path, "--model", "tiny", "--dtype", "float32", "--quick")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    rows = [(row["load"], row["policy"]) for row in result["rows"]]
    assert rows == [
        ("middle", policy) for policy in ("slack", "inference-only", "token-fusion", "harli")
    ]
    assert result["seconds"] == pytest.approx(60 / (4 + 3) / 1.4, rel=0.01), (
        "shares of the time, with the warm-up and the search"
    )
    assert result["rows"][0]["rate"] == pytest.approx(0.6 * result["saturation_rate"], rel=1e-3)


def test_the_device_decides_where_its_model_was_measured_on_a_busy_machine(tmp_path, monkeypatch):
    """The model's steps are far longer than the device's, so that the model holds the SLOs at no
    rate."""
    modelled = TorchPlace.modelled

    def disturbed(
        self: TorchPlace, backbone: Backbone, true: LatencyModel | None = None
    ) -> ModelledPlace:
        slow = deepcopy(self.latency)
        for _ in range(40):
            for rows in (1 << bit for bit in range(10)):
                seconds = slow.corrections.of("forward", rows, False)
                slow.corrections.observe(
                    "forward", rows, False, predicted_s=seconds, measured_s=1e3
                )
        return modelled(self, backbone, slow)

    monkeypatch.setattr(TorchPlace, "modelled", disturbed)
    monkeypatch.setattr("experiments.compare.__main__._QUICK_MINUTES", 0.5)
    done = run_command(tmp_path, "--model", "tiny", "--dtype", "float32", "--quick")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["saturation_rate"] > 0
    with pytest.raises(BudgetError, match="at any rate"):
        run_command(
            tmp_path, "--model", "tiny", "--dtype", "float32", "--quick", "--slo-tpot", "1us"
        )


def test_separate_processes_serve_and_fine_tune_the_same_trace(tmp_path, monkeypatch):
    core = min(own_cores())
    monkeypatch.setattr("coserve.bench.machine.own_cores", lambda: (core,))
    data = tmp_path / "set.jsonl"
    data.write_text(
        "".join(json.dumps({"question": "Why? " * n, "answer": "So."}) + "\n" for n in (1, 9))
    )
    options = (
        "--seconds",
        "4",
        "--rates",
        "3",
        "--policies",
        "slack",
        "--length-factor",
        "0.1",
        "--data",
        str(data),
    )
    done = run_command(
        tmp_path,
        "--model",
        "tiny",
        "--dtype",
        "float32",
        *options,
        "--slo-ttft",
        "60s",
        "--slo-tpot",
        "9s",
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = result["rows"]
    assert (ours["policy"], theirs["policy"]) == ("slack", "transformers+peft:shared")
    assert ours["requests"] == theirs["requests"] > 5 and theirs["unanswered"] == 0
    assert theirs["attainment"] == 1 and theirs["tuning_tokens_per_s"] > 0
    assert (
        0
        < theirs["inference_tokens_per_s"]
        < 1.01 * sum(round(0.1 * each.num_output_tokens) + 1 for each in TRACE)
    )
    (against,) = result["against_separate"]
    assert against["best_rival"] == theirs["policy"]
    assert against["ratio"] == pytest.approx(
        ours["tuning_tokens_per_s"] / theirs["tuning_tokens_per_s"], rel=0.01
    )
    assert "modelled" in ours and "modelled" not in theirs
    assert ours["evictions"] == 0 and theirs["evictions"] is theirs["packs_dropped"] is None


def test_separate_processes_share_the_cores_or_split_them():
    def names(**fields):
        processes = SeparateProcesses(model="m", dtype="float32", cores=(0, 2, 5), **fields)
        return [(each.name, each.serving, each.training) for each in processes.arrangements()]

    split = [((0,), (2, 5), "1|2"), ((0, 2), (5,), "2|1")]
    shared = ("transformers+peft:shared", (0, 2, 5), (0, 2, 5))
    expected = [
        shared,
        *((f"transformers+peft:{name}", left, right) for left, right, name in split),
    ]
    assert names() == expected
    assert names(device="cuda") == [shared]
    assert [name for name, _, _ in names(vllm=Path("python"))][3:] == [
        f"vllm+peft:{name}" for name in ("shared", "1|2", "2|1")
    ]


def separate_cells(model: str, vllm: Path | None = None) -> list[Cell | Ended]:
    """What becomes of them at two rates."""
    processes = SeparateProcesses(model=model, dtype="float32", cores=own_cores()[:1], vllm=vllm)
    config = CompareConfig(policies=("slack",), seconds=1.0)
    latency = LatencyModel(
        roofline_profile(load_backbone("dummy:qwen2.5-0.5b", device="meta"), A40)
    )
    rates = {"light": 1.0, "heavy": 2.0}
    return list(processes.cells(TRACE, SLO, rates, config, latency, lambda words: None))


def test_a_separate_process_that_ends_says_why_and_the_others_run(tmp_path):
    shared, vllm = separate_cells(str(tmp_path / "none"), vllm=tmp_path / "python")
    assert isinstance(shared, Ended) and isinstance(vllm, Ended)
    assert (shared.policy, shared.load) == ("transformers+peft:shared", "light")
    assert re.search("the process that should serve beside the other ended: .*none", shared.reason)
    assert vllm.policy == "vllm+peft:shared" and "none' is not a directory" in vllm.reason


def test_a_separate_process_that_ends_between_two_rates_keeps_its_rows(tmp_path, monkeypatch):
    rescaled = []

    def rescale_and_kill(trace, *, rate, seconds):
        rescaled.append(rate)
        if len(rescaled) == 2:
            workers = subprocess.run(
                ["pgrep", "-P", str(os.getpid())], capture_output=True, text=True
            ).stdout.split()
            for pid in workers:
                if "separate_worker" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)
        return rescale(trace, rate=rate, seconds=seconds)

    monkeypatch.setattr("experiments.compare.separate.rescale", rescale_and_kill)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    python.chmod(0o700)
    light, heavy, vllm = separate_cells("tiny", vllm=python)
    assert isinstance(vllm, Ended) and vllm.reason.startswith("vLLM does not start with")
    assert "no such module" in vllm.reason
    assert isinstance(light, Cell) and (light.load, light.is_separate) == ("light", True)
    assert isinstance(heavy, Ended) and heavy.load == "heavy" and "ended" in heavy.reason
    compared = Compared(
        place="here",
        slo=SLO,
        solo_s=0.01,
        length_factor=1,
        saturation=None,
        seconds=1.0,
        cells=[light],
        ended=[heavy],
    )
    assert compared.result()["ended"] == [
        {"policy": heavy.policy, "load": "heavy", "reason": heavy.reason}
    ]
    ran = {
        "model": "tiny",
        "dtype": "float32",
        "machine": "here",
        "date": "2026-11-27",
        "settings": {},
    }
    assert f"{heavy.policy} has no row from heavy on: " in compare_html(ran, [compared])


def test_separate_processes_are_not_modelled(tmp_path):
    done = run_command(tmp_path, "--device", "modelled", "--separate")
    assert done.exit_code == 2 and "separate processes run on this machine" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "none"), "policy 'none' is not one of slack"),
        (
            ("--policies", "slack,temporal-sharing:m=64"),
            "policy 'temporal-sharing' has no setting 'm'",
        ),
        (("--rates", "1,x"), "'1,x' must be numbers above 0"),
        (
            ("--device", "modelled", "--hardware", "abacus"),
            f"'abacus' is not one of {', '.join(CATALOGUE)}",
        ),
        (("--slo-ttft", "5"), "has no unit"),
        (("--slo-tpot", "0ms"), "'0ms' must be above 0"),
        (
            ("--hardware", "h100"),
            "this comparison would run on this machine: add --device modelled",
        ),
        (("--workers", "2"), "add --device modelled, or leave out --workers"),
        (("--picture", "."), ". cannot be written (it is a directory)"),
        (("--where", "dense"), "'dense' must be COLUMN=VALUE"),
        (
            ("--no-separate", "--vllm", "python"),
            "--vllm is one of the separate processes: leave out --no-separate",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    done = run_command(tmp_path, *arguments)
    assert done.exit_code != 0 and message in plain(done.output)
