"""`coserve plan`: hours of traces and of days, what they leave over, and what separate devices
would cost."""

import json
from math import ceil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from coserve.bench.cells import CompareConfig
from coserve.bench.places import ModelledPlace
from coserve.bench.plan import hours_of_day, hours_of_trace, plan
from coserve.cli.main import app
from coserve.models import load_backbone
from coserve.simulate.hardware import Hardware
from coserve.workloads.arrivals import LogNormalLengths, poisson
from coserve.workloads.traces import TracedRequest

pytestmark = pytest.mark.long

LENGTHS = LogNormalLengths(mean_prompt_tokens=100, mean_output_tokens=10)
SLOW = Hardware(
    name="slow", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5, memory_bytes=4 * 10**9
)


def test_a_trace_is_divided_into_hours_with_every_request_in_one():
    trace = poisson(rate=0.1, seconds=3600 * 2.1, seed=0, lengths=LENGTHS)
    hours = hours_of_trace(trace)
    assert [round(hour.seconds / 3600, 1) for hour in hours] == [1, 1.1], (
        "what is left is no hour of its own"
    )
    assert sum(len(hour.requests) for hour in hours) == len(trace)
    assert all(hour.rate == pytest.approx(0.1, rel=0.1) for hour in hours)
    faster = hours_of_trace(trace, rate=0.3)
    assert sum(hour.rate * hour.seconds for hour in faster) == pytest.approx(
        3 * len(trace), rel=0.01
    )
    short = hours_of_trace(
        [
            TracedRequest(at_s=float(at_s), num_prompt_tokens=1, num_output_tokens=1)
            for at_s in range(60)
        ]
    )
    assert (
        len(short) == 1
        and short[0].seconds == pytest.approx(60)
        and short[0].rate == pytest.approx(1)
    )


def test_a_day_has_hours_of_its_curve():
    hours = hours_of_day([1] * 23 + [0], rate=2.3, sample_s=10.0, lengths=LENGTHS, seed=0)
    assert len(hours) == 24 and hours[-1].rate == 0 and not hours[-1].requests
    assert sum(hour.rate for hour in hours) / 24 == pytest.approx(2.3)


def test_busy_hours_leave_less_over_and_devices_are_as_many_as_requests_need():
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    place = ModelledPlace.of_hardware(backbone, SLOW)
    hours = hours_of_day([0, 1, 20], rate=2.0, sample_s=20.0, lengths=LENGTHS, seed=0)
    found = plan(place, hours, CompareConfig(policies=(), seconds=20.0), price=3.0)
    assert found.num_devices == ceil(hours[2].rate / found.saturation)
    idle, quiet, busy = found.hours
    assert idle.tuning_tokens_per_s == found.num_devices * found.alone_tokens_per_s
    assert idle.tuning_tokens_per_s > quiet.tuning_tokens_per_s > busy.tuning_tokens_per_s > 0
    result = found.result()
    assert result["cost"] == 3.0 * 3 * found.num_devices
    assert result["separate_cost"] == 3.0 * 3 * result["separate_devices"] > result["cost"]
    assert found.num_more_devices < found.num_devices
    assert result["tuning_tokens"] == pytest.approx(
        sum(row["tuning_tokens"] for row in result["rows"]), abs=3
    )


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_the_command_leaves_a_page_and_ends_with_a_line_of_json(tmp_path):
    trace, page = tmp_path / "trace.csv", tmp_path / "plan.html"
    trace.write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{n / 2},100,5\n" for n in range(40))
    )
    done = run_command(
        "--trace", str(trace), "--picture", str(page), "--sample", "2", "--slo-tpot", "100ms"
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["devices"] == 1 and [row["hour"] for row in result["rows"]] == [0]
    assert result["model_error"]["tuning_tokens_per_s"] > 0
    assert result["model_error"]["measured"]["model"] == "LLaMA-3.1-8B", "the model of the plan"
    drawn = ElementTree.fromstring(page.read_text().split("\n", 1)[1])
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}svg")) == 2


def test_a_page_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("this is none\n")
    nowhere = tmp_path / "none" / "plan.html"
    for page, reason in ((nowhere, "No such file or directory"), (tmp_path, "it is a directory")):
        done = run_command("--trace", str(trace), "--picture", str(page))
        assert done.exit_code == 2
        said = " ".join(done.output.replace("│", "").split())
        assert f"cannot be written ({reason})" in said and "no column" not in said


def test_bad_input_is_one_line(tmp_path: Path):
    day = tmp_path / "day.csv"
    day.write_text("hour_of_day,requests\n" + "".join(f"{hour},5\n" for hour in range(24)))
    for arguments, words in (
        (("--trace", str(day)), "set their mean rate per second"),
        (
            ("--trace", str(day), "--rate", "1", "--hardware", "a100,h100"),
            "only one kind of device is possible here",
        ),
        (("--trace", str(day), "--rate", "inf"), "less than or equal to 1000000000"),
        (
            ("--trace", str(day), "--rate", "1", "--price", "inf"),
            "less than or equal to 1000000000",
        ),
        (("--trace", str(day), "--rate", "1", "--sample", "inf"), "less than or equal to 3600"),
        (
            ("--trace", str(day), "--rate", "1", "--sequence", "200000"),
            "more than the model's maximum, 131072",
        ),
        (
            ("--trace", str(day), "--rate", "1", "--where", "slice=a"),
            "has requests by hour, so there are no rows to select",
        ),
        (
            ("--trace", str(day), "--where", "slice"),
            "'slice' must be COLUMN=VALUE, such as slice=dense",
        ),
    ):
        done = run_command(*arguments)
        assert done.exit_code != 0 and words in " ".join(done.output.replace("│", "").split())
