"""The same records from JSONL, CSV and Parquet; `coserve data check`, which reads them as jobs
do."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from engines import make_engine, word_tokenizer
from pyarrow import parquet
from served import tokenizer

from coserve.cli.main import main
from coserve.devices.profiles.kept import keep_profile
from coserve.engine.prompts import load_tokenizer
from coserve.errors import DataError
from coserve.jobs.datasets.examples import read_training_file
from coserve.jobs.lifecycle.estimate import seconds_alone
from coserve.models import load_backbone
from coserve.models.source import find_model
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.order import TrainingOrder
from coserve.tuning.reading_report import ReadingReport
from coserve.tuning.training_files import TrainingFile

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "hi\nyou"},
            {"role": "assistant", "content": 'say, "ho"', "weight": 1},
        ]
    },
    {
        "messages": [{"role": "assistant", "content": "日本 first"}],
        "tools": [{"type": "function", "function": {}}],
    },
]
TEXTS = [
    {"prompt": "a, b", "completion": '"c"\nd', "id": 3},
    {"prompt": "x", "completion": "1", "id": 4},
]
ALPACA = [
    {"instruction": "add", "input": "1 2", "output": "3"},
    {"instruction": "wait", "input": "", "output": "ok"},
]
PAIRS = [
    {
        "input": {"messages": [{"role": "user", "content": "hi"}]},
        "preferred_output": [{"role": "assistant", "content": "ho"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
]
ANSWERS = [
    {"prompt": "a", "completion": "b", "label": True},
    {"prompt": "c", "completion": "d", "label": False},
]
SAMPLED = [
    {"prompt_tokens": [1], "completion_tokens": [2, 3], "logprobs": [-1.5, -2.0], "advantages": 0.5}
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """In the form that the path's name says; tables have a column for each field of any record."""
    names = list(dict.fromkeys(name for record in records for name in record))
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, names)
            rows.writeheader()
            for record in records:
                texts = {
                    n: value if isinstance(value, str) else json.dumps(value)
                    for n, value in record.items()
                }
                rows.writerow(
                    texts
                    | {n: str(value) for n, value in record.items() if isinstance(value, bool)}
                )
    return path


def read(path: Path, objective: str = "supervised", **settings: Any) -> list[Example]:
    given = {"max_sequence_length": 100, "vocab_size": 1 << 20, **settings}
    return read_training_file(path, tokenizer(), objective=objective, **given)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("records", "objective"),
    [
        *((each, "supervised") for each in (CHATS, TEXTS, ALPACA)),
        *((PAIRS, "dpo"), (ANSWERS, "kto"), (SAMPLED, "policy-gradient")),
    ],
    ids=["chats", "texts", "alpaca", "pairs", "answers", "sampled"],
)
def test_tables_hold_the_examples_of_jsonl(tmp_path, kind, records, objective):
    lines, table = (write(tmp_path / f"data.{each}", records) for each in ("jsonl", kind))
    assert read(table, objective) == read(lines, objective)


def test_the_python_api_reads_the_same_files(tmp_path):
    engine, found = make_engine(tokenizer=word_tokenizer()), []
    for kind in ("jsonl", "csv", "parquet"):
        path = write(tmp_path / f"data.{kind}", [{"prompt": "a b", "completion": "c"}])
        found.append(engine.job(engine.submit(path, TuningConfig())).order.examples)
    assert found[0] == found[1] == found[2]


def test_what_is_wrong_with_a_table_is_named_by_its_line(tmp_path):
    path = tmp_path / "data.csv"
    for text, wrong in (
        (
            "text\n\nfine\nfine,too\n",
            "line 4: has 2 cells; the header has 1: a comma without quotes?",
        ),
        ('text\n"two\nlines"\n"open\n', "line 4: is not valid CSV .unexpected end of data"),
        ("text,text\na,b\n", "line 1: the header has 'text' more than once"),
        ("messages\nhello\n", "line 2: messages is not valid JSON"),
        ("txt\nhello\n", "line 2: needs messages, or conversations"),
        (
            "text\n" + '"' + "a\n" * (1 << 20) + '"',
            "is not valid CSV .field larger than field limit",
        ),
        ("text\n", "there is no line with an example"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=wrong):
            read(path)
    path.write_bytes(b'\xef\xbb\xbf"text",other\r\nfine,1\r\n')
    assert len(read(path)) == 1, "as spreadsheets write it"


def test_what_is_wrong_with_a_parquet_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "data.parquet", [{"text": "fine"}, {"text": "a" * (1 << 20)}])
    with pytest.raises(DataError, match="row 2: is longer than 1048576 characters"):
        read(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="is a Parquet file that cannot be read: "):
        read(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"is not installed here: pip install 'coserve\[parquet\]'"):
        read(path)


def test_records_that_are_left_out_do_not_hide_tokens_of_another_vocabulary(tmp_path):
    path = write(
        tmp_path / "data.jsonl", [{"prompt": "a " * 99, "completion": "b"}, {"text": "fine"}]
    )
    report = ReadingReport()
    with pytest.raises(
        DataError, match=r"line 2: has token \d+; the model has 1: is this its tokenizer"
    ):
        read(path, max_sequence_length=9, vocab_size=1, report=report)
    assert report.left_out.lines() == ["line 1: has no token to train on within 9 tokens"]


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    for encoding in ("utf-16-le", "utf-16-be"):
        path.write_bytes(("\ufeff" + json.dumps(CHATS[0])).encode(encoding))
        with pytest.raises(DataError, match="is UTF-16; save it as UTF-8"):
            read(path)
    path.write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(DataError, match="line 1: is not UTF-8 at byte 10"):
        read(path)


def test_the_share_of_a_table_that_was_read_is_known(tmp_path):
    for kind in ("csv", "parquet"):
        path = write(tmp_path / f"data.{kind}", [{"text": f"number {n}"} for n in range(100)])
        file = TrainingFile(path)
        read_so_far = [file.num_bytes_read for _ in file.records()]
        assert (
            read_so_far == sorted(read_so_far)
            and 0 < read_so_far[0] < read_so_far[50] < read_so_far[-1]
        )
        assert read_so_far[-1] == path.stat().st_size


def find_tokenizer() -> Any:
    return load_tokenizer(find_model("tiny"))


# -- coserve data check -------------------------------------------------------------------


def check(monkeypatch, capsys, *arguments: Any) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["coserve", "data", "check", *map(str, arguments)])
    with pytest.raises(SystemExit) as status:
        main()
    return int(status.value.code or 0), capsys.readouterr().out


def test_a_file_is_shown_as_a_job_would_read_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(
        "COSERVE_CACHE", str(tmp_path / "cache")
    )  # where profiles of the device are kept
    records = [
        {"prompt": "one two three", "completion": " four"},
        {"text": "five six seven eight nine ten"},
    ]
    records += [{"prompt": "eleven " * 30, "completion": "no"}]
    path = write(tmp_path / "data.jsonl", records)
    status, out = check(monkeypatch, capsys, path, "--max-length", 16, "--json")
    assert status == 0
    assert "one two three⟦ four<|end|>⟧" in out
    report = json.loads(out.splitlines()[-1])
    noticed = ReadingReport()
    examples = read_training_file(
        path, find_tokenizer(), max_sequence_length=16, vocab_size=1 << 20, report=noticed
    )
    assert report["tokens"] == sum(len(example.tokens) for example in examples)
    assert report["trained_tokens"] == sum(example.num_trained for example in examples)
    assert (report["examples"], report["lengths"]["longest"]) == (
        2,
        max(len(each.tokens) for each in examples),
    )
    assert (
        report["left_out"]
        == noticed.left_out.lines()
        == ["line 3: has no token to train on within 16 tokens"]
    )
    assert report["num_left_out"] == 1
    assert report["cut"] == [f"line {n}" for n, each in enumerate(examples, 1) if each.truncated]
    assert report["seconds_alone"] is None and "has not measured the model" in out


def test_a_file_that_a_job_would_refuse_is_refused(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "data.jsonl", [{"text": "fine"}, {"txt": "wrong"}])
    status, out = check(monkeypatch, capsys, path, "--json")
    assert status == 1 and "line 2: needs messages" in out
    assert json.loads(out.splitlines()[-1])["faults"][0].startswith("line 2: needs messages")


def test_a_method_that_is_none_is_named_as_jobs_name_them(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "data.jsonl", [{"text": "fine"}])
    monkeypatch.setattr(
        sys, "argv", ["coserve", "data", "check", str(path), "--method", "policy-gradient"]
    )
    with pytest.raises(SystemExit) as status:
        main()
    told = " ".join(capsys.readouterr().err.split())
    assert status.value.code == 2 and "--method" in told
    assert "'policy-gradient' is not one of supervised" in told and "policy_gradient" in told


def test_the_time_is_that_of_the_stored_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path / "home"))
    hardware = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
    backbone = load_backbone("tiny", dtype="float32")
    shapes = load_backbone("tiny", dtype="float32", device="meta")
    profile, path = (
        roofline_profile(shapes, hardware),
        write(tmp_path / "data.jsonl", [{"text": "fine"}] * 40),
    )
    keep_profile(backbone, profile)
    times = {}
    for epochs in (1, 3):
        status, out = check(monkeypatch, capsys, path, "--epochs", epochs, "--json")
        report = json.loads(out.splitlines()[-1])
        assert status == 0 and report["measured_on"].endswith(", float32")
        times[epochs] = report["seconds_alone"]
    order = TrainingOrder(
        read_training_file(path, find_tokenizer(), max_sequence_length=1024, vocab_size=1 << 20),
        TuningConfig(batch_size=report["batch_size"]),
    )
    assert times[1] == pytest.approx(seconds_alone(order, profile)) and times[3] == pytest.approx(
        3 * times[1]
    )


# -- files of public reports --------------------------------------------------------------


def lines_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    return path


def test_files_of_public_reports_are_read(tmp_path, monkeypatch, capsys):
    chat = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    }
    status, out = check(
        monkeypatch, capsys, lines_of(tmp_path, "\n\n" + json.dumps([chat, chat])), "--json"
    )
    assert status == 0 and json.loads(out.splitlines()[-1])["examples"] == 2
    refused = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
    path = lines_of(
        tmp_path, json.dumps({"messages": [{"role": "user", "content": "bad"}, refused]})
    )
    status, out = check(monkeypatch, capsys, path)
    assert status == 0 and "bad<|end|><|assistant|>⟦I cannot help with that.<|end|>⟧" in out


def test_a_check_says_what_is_not_learned_and_by_which_template(tmp_path, monkeypatch, capsys):
    asked = {"role": "user", "content": "hi"}
    thinks = {
        "messages": [asked, {"role": "assistant", "content": "hello", "reasoning_content": "hm"}]
    }
    unwanted = {"messages": [asked, {"role": "assistant", "content": "hello", "weight": 0}]}
    path = lines_of(tmp_path, "\n".join(json.dumps(each) for each in (thinks, unwanted, thinks)))
    status, out = check(monkeypatch, capsys, path, "--json")
    report = json.loads(out.splitlines()[-1])
    assert status == 0
    assert report["warnings"] == [
        "lines 1 and 3: reasoning_content is not learned: the chat template does not write it"
    ]
    assert report["left_out"] == [
        "line 2: has no turn to train on: each message of the assistant has weight 0"
    ]
    assert (
        "Not trained on, by tiny's chat template (1):" in out
        and "Left out, with nothing to train on (1):" in out
    )
