"""Fine-tuning sets become lines of jobs, and what is none is refused by its line."""

import gzip
import json
from pathlib import Path

import pytest

from coserve.errors import DataError
from coserve.workloads.datasets import read_dataset

RECORDED = Path(__file__).parents[3] / "shared" / "data"
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "prompt", "completion"),
    [
        (ALPACA, "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n", "3"),
        ({**ALPACA, "input": ""}, "### Instruction:\nAdd.\n\n### Response:\n", "3"),
        ({"question": "1+1?", "answer": "#### 2"}, "Question: 1+1?\nAnswer:", " #### 2"),
        (
            {"question": "Warm?", "choices": ["ice", "fire"], "answer": 1},
            "Warm?\nA. ice\nB. fire\nAnswer:",
            " B. fire",
        ),
        ({"premise": "It rains.", "hypothesis": "It is wet.", "label": 1}, None, " yes"),
        ({"sentence": "dull", "label": 0}, "dull\nSentiment:", " negative"),
        (
            {"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment", "idx": 0},
            None,
            " yes",
        ),
        (
            {"premise": "It rains.", "hypothesis": "It is hot.", "label": "not_entailment"},
            None,
            " no",
        ),
        ({"premise": "It rains.", "hypothesis": "It is wet.", "idx": 7, "label": 0}, None, " yes"),
        ({"premise": "It rains.", "hypothesis": "It is hot.", "idx": 7, "label": 1}, None, " no"),
        (
            {"sentence1": "It rains.", "sentence2": "It is hot.", "label": "not_entailment"},
            "It rains.\nDoes it follow that It is hot. Yes or no?",
            " no",
        ),
        (
            {
                "id": "7",
                "question_stem": "Warm?",
                "choices": {"text": ["ice", "fire"], "label": ["A", "B"]},
            }
            | {"answerKey": "B"},
            "Warm?\nA. ice\nB. fire\nAnswer:",
            " B. fire",
        ),
        (
            {
                "id": "7",
                "question": {
                    "stem": "Warm?",
                    "choices": [{"text": "ice", "label": "A"}, {"text": "fire", "label": "B"}],
                },
                "answerKey": "B",
            },
            "Warm?\nA. ice\nB. fire\nAnswer:",
            " B. fire",
        ),
    ],
)
def test_each_set_is_told_by_its_fields(tmp_path, record, prompt, completion):
    (line,) = read_dataset(write(tmp_path / "set.jsonl", record))
    assert line.keys() == {"prompt", "completion"} and line["completion"] == completion
    assert prompt is None or line["prompt"] == prompt


def test_arrays_zipped_files_and_lines_of_jobs_are_read_too(tmp_path):
    path = tmp_path / "alpaca.json.gz"
    path.write_bytes(gzip.compress(json.dumps([ALPACA] * 3).encode()))
    assert len(read_dataset(path)) == 3 and len(read_dataset(path, most=2)) == 2
    line = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    assert read_dataset(write(tmp_path / "job.jsonl", line)) == [line]


def test_glues_tables_are_read_as_they_are(tmp_path):
    """With tabs between the fields, and quotes that are text."""
    path = tmp_path / "train.tsv"
    path.write_text('sentence\tlabel\nhide , " new secretions \t0\n"fine\t1\n')
    assert [line["completion"] for line in read_dataset(path)] == [" negative", " positive"]
    assert [line["prompt"] for line in read_dataset(path)][1] == '"fine\nSentiment:'
    path.write_text(
        "index\tsentence1\tsentence2\tlabel\n0\tIt rains, a lot.\tIt is wet.\tentailment\n"
    )
    (line,) = read_dataset(path)
    assert line["prompt"].startswith("It rains, a lot.\n") and line["completion"] == " yes"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": 1}, "line 2: has the fields a; known are instruction, output; "),
        ({"sentence": "fine", "label": 5}, "line 2: has the label 5: must be 0 to 1"),
        ({"sentence": "of a test set", "label": -1}, "line 2: has the label -1: must be 0 to 1"),
        (
            {"premise": "It rains.", "hypothesis": "It is wet.", "label": "contradiction"},
            "line 2: ValueError",
        ),
        (
            {"sentence1": "a", "sentence2": "b", "label": 1},
            "line 2: has the label 1, and sentence1 and sentence2 as ",
        ),
        (
            {"question": "?", "choices": ["a"], "answer": -1},
            "line 2: has the label -1: must be 0 to 0",
        ),
        ({"question": "?", "choices": ["a"], "answer": "x"}, "line 2: ValueError"),
    ],
)
def test_what_is_no_record_is_refused_by_its_line(tmp_path, record, message):
    with pytest.raises(DataError, match=message):
        read_dataset(write(tmp_path / "set.jsonl", ALPACA, record))
    with pytest.raises(DataError, match="has no records"):
        read_dataset(write(tmp_path / "nothing.jsonl"))


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded sets are not here")
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("alpaca_5k", 5000),
        ("gsm8k_train", 7473),
        ("sst2_train", 6920),
        ("rte_dev", 277),
        ("openbookqa_train", 4957),
    ],
)
def test_the_sets_that_were_recorded(name, number):
    lines = read_dataset(RECORDED / f"{name}.jsonl.gz")
    assert len(lines) == number
    assert all(
        isinstance(line["prompt"], str) and isinstance(line["completion"], str) for line in lines
    )
