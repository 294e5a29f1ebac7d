"""Results as files, and what two of them say about each other."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from coserve.bench.results import Result, read_result, save_result
from coserve.errors import CoserveError
from coserve.version import VERSION
from experiments import compare_results
from experiments.compare_results import changes, direction


def test_a_saved_result_has_the_command_the_code_and_the_machine(tmp_path, monkeypatch):
    command = ["/usr/bin/python3", "-m", "experiments.plan_time", "--save", "a b"]
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = save_result(tmp_path / "new", "plan_time", {"min_us": 3.5})
    result = read_result(path)
    assert path.name.startswith("plan_time-")
    assert result.command == "OMP_NUM_THREADS=1 python -m experiments.plan_time --save 'a b'"
    assert (result.version, result.numbers) == (VERSION, {"min_us": 3.5})
    assert result.machine.processor and result.machine.cores >= 1
    assert result.machine.memory_bytes > 1 << 20 and result.load >= 0


def test_the_installed_command_is_named_without_its_place(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "/opt/bin/coserve", "bench", "decode"])
    path = save_result(tmp_path, "decode", {})
    assert read_result(path).command == "coserve bench decode"


@pytest.mark.parametrize("text", ["{", "[]", '{"experiment": "decode"}'])
def test_a_file_that_is_no_result_is_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(CoserveError, match=r"other\.json is not a result"):
        read_result(path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CoserveError, match="cannot be written"):
        save_result(tmp_path / "file", "decode", {})


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("rows[batch=1].step_ms", "lower"),
        ("tuning_tokens_per_s", "higher"),
        ("predictions_us.forward pass", "lower"),
        ("attainment", "higher"),
        ("activation_bytes", "lower"),
        ("us_per_step", "lower"),
        ("jobs", None),
        ("rows[batch_ms=1].context", None),
    ],
)
def test_a_names_unit_says_which_direction_is_better(name, better):
    assert direction(name) == better


def test_rows_are_matched_by_their_settings_and_lists_by_their_median():
    before = {"rows": [{"batch": 1, "step_ms": 10.0}, {"batch": 4, "step_ms": 20.0}]}
    after = {"rows": [{"batch": 4, "step_ms": 21.0}, {"batch": 1, "step_ms": 12.0}]}
    found = {each.name: each.ratio for each in changes(before, after) if each.better}
    assert found == {
        "rows[batch=1].step_ms": pytest.approx(1.2),
        "rows[batch=4].step_ms": pytest.approx(1.05),
    }
    (times,) = changes({"turns_ms": [1.0, 2.0, 9.0]}, {"turns_ms": [1.0, 3.0, 3.0]})
    assert (times.before, times.after) == (2.0, 3.0)


def compare(before: dict[str, Any], after: dict[str, Any], place: Path, *options: str) -> int:
    """Return the status of the command on two results."""
    paths = [
        save_result(place / side, "decode", numbers)
        for side, numbers in (("before", before), ("after", after))
    ]
    sys.argv = ["compare_results", *map(str, paths), *options]
    return compare_results.main()


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])


def test_what_fell_is_listed_and_makes_the_status_1(tmp_path, capsys):
    before = {"step_ms": 10.0, "tokens_per_s": 100.0, "context": 512}
    after = {"step_ms": 9.0, "tokens_per_s": 90.0, "context": 1024}
    assert compare(before, after, tmp_path) == 1
    _, fell, rose, rest, _ = capsys.readouterr().out.split("\n\n")
    assert fell == "fell\n  tokens_per_s: 100 -> 90 (0.900 x)"
    assert rose == "rose\n  step_ms: 10 -> 9 (0.900 x)"
    assert rest.startswith("differs, and is not judged\n  context")


def test_differences_within_the_tolerance_do_not_count(tmp_path, capsys):
    assert compare({"step_ms": 10.0}, {"step_ms": 10.4}, tmp_path) == 0
    assert "0 of 1 numbers fell" in capsys.readouterr().out
    assert compare({"step_ms": 10.0}, {"step_ms": 10.4}, tmp_path, "--tolerance", "0.01") == 1


def test_another_machine_is_named(tmp_path, capsys):
    path = save_result(tmp_path, "decode", {"step_ms": 1.0})
    other = json.loads(path.read_text())
    other["machine"]["cores"] = 4096
    (tmp_path / "other.json").write_text(json.dumps(other))
    sys.argv = ["compare_results", str(path), str(tmp_path / "other.json")]
    assert compare_results.main() == 0
    assert "then 4096" in capsys.readouterr().out


def test_results_without_a_common_number_are_an_error(tmp_path, capsys):
    assert compare({"step_ms": 1.0}, {"ratio": 1.0}, tmp_path) == 2
    assert "no number in common" in capsys.readouterr().err


def test_the_results_that_are_kept_can_be_read():
    kept = Path(__file__).parents[2] / "benchmarks" / "results"
    for path in kept.glob("*.json"):
        assert isinstance(read_result(path), Result)
        assert "+changes" not in path.name, "a commit says what was measured"
