"""`coserve demo --quick` as a user runs it: the report, the numbers, and an adapter that PEFT
loads."""

import copy
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from peft import PeftModel
from served import model, model_directory

pytestmark = pytest.mark.long

ROOT = str(Path(__file__).parents[2])
COMMAND = [sys.executable, "-m", "coserve", "demo", "--quick", "--model", str(model_directory())]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The directory that it left, and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "report"
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*COMMAND, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def test_the_last_line_has_the_main_numbers(demo):
    out, printed = demo
    numbers = json.loads(printed.splitlines()[-1])
    results = json.loads((out / "results.json").read_text())
    assert numbers["requests"] > 0 and numbers["failed"] == 0
    assert 0 <= numbers["attainment"] <= 1 and numbers["tpot_p99_ms"] > 0
    assert numbers["tuning_tokens_per_s"] > 0 and numbers["job_alone_tokens_per_s"] > 0
    assert (
        numbers["fine_tuned_model"] == results["job"]["model"]
        and "pirate" in numbers["fine_tuned_model"]
    )


def test_the_report_names_the_threads_of_the_engine(demo):
    results = json.loads((demo[0] / "results.json").read_text())
    assert results["threads"] == 1, "a small model is worth no more, whatever the machine has"
    assert f", 1 thread of {os.cpu_count()}" in results["machine"]
    assert results["machine"] in "".join(
        ElementTree.parse(demo[0] / "report.html").getroot().itertext()
    )


def test_the_same_trace_and_the_same_job_ran_in_their_phases(demo):
    phases = json.loads((demo[0] / "results.json").read_text())["phases"]
    arrivals = [
        [outcome["arrival_s"] for outcome in phases[name]["outcomes"]]
        for name in ("requests", "both")
    ]
    assert arrivals[0] == arrivals[1] and arrivals[0] and not phases["job"]["outcomes"]
    assert phases["requests"]["tuning"] is None and all(
        step[5] == step[6] == 0 for step in phases["requests"]["steps"]
    )
    assert (
        any(step[3] and step[5] for step in phases["both"]["steps"])
        or phases["both"]["tuning"]["steps"]
    )
    tunings = [phases[name]["tuning"] for name in ("both", "job")]
    common = min(tuning["steps"] for tuning in tunings)
    assert common > 0
    losses = [[loss for _, _, loss in tuning["losses"]][:common] for tuning in tunings]
    assert losses[0] == pytest.approx(losses[1], rel=0.02), (
        "what runs beside a job changes nothing but rounding"
    )


def test_the_report_is_one_page_and_the_adapter_is_pefts(demo):
    out, _ = demo
    page = ElementTree.fromstring((out / "report.html").read_text())
    assert (
        len([e for e in page.iter("{http://www.w3.org/2000/svg}svg") if e.get("role") == "img"])
        == 6
    )
    adapted = PeftModel.from_pretrained(copy.deepcopy(model()), out / "adapter")
    weights = {name: value for name, value in adapted.named_parameters() if "lora_B" in name}
    assert weights and all(float(value.abs().sum()) > 0 for value in weights.values())


@pytest.mark.long
def test_a_demo_on_two_ranks_says_so(tmp_path):
    out = tmp_path / "report"
    command = [*COMMAND, "--tensor-parallel", "2", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert (
        numbers["tensor_parallel"] == 2
        and numbers["failed"] == 0
        and numbers["tuning_tokens_per_s"] > 0
    )
    results = json.loads((out / "results.json").read_text())
    assert results["machine"].startswith("2 ranks, each ")
    assert results["settings"]["command"] == "coserve demo --tensor-parallel 2"
    text = "".join(ElementTree.parse(out / "report.html").getroot().itertext())
    assert results["machine"] in text and "2 processes hold the model together" in text
