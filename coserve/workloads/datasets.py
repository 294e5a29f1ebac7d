"""Fine-tuning sets, as published, as lines for jobs: Alpaca, GSM8K, SST-2, RTE, OpenBookQA.

A set is told by its fields; files are JSONL or a JSON array, plain or gzipped. Each record becomes a prompt and a
completion, which any tokenizer can take; lines that are in the format of jobs already stay as they are.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coserve.errors import DataError
from coserve.workloads.files import read_records
from coserve.workloads.lessons import Line

_Record = Mapping[str, Any]


def read_dataset(path: str | Path, *, most: int | None = None) -> list[Line]:
    """The records of a set as lines for a job: the first of them, at most as many.

    Raises:
        DataError: it cannot be read, is none of these sets, or a record of it is none of its set's.
    """
    lines: list[Line] = []
    for number, record in read_records(path):
        if len(lines) == most:
            break
        try:
            lines.append(_line(record))
        except (DataError, KeyError, IndexError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{path}, line {number}: {reason}") from None
    if not lines:
        raise DataError(f"{path} has no records")
    return lines


def _line(record: _Record) -> Line:
    for fields, make in _SETS:
        if fields <= record.keys():
            prompt, completion = make(record)
            return {"prompt": prompt, "completion": completion}
    if record.keys() & {"messages", "prompt", "text"}:
        return dict(record)
    known = "; ".join(", ".join(sorted(fields)) for fields, _ in _SETS)
    raise DataError(f"has the fields {', '.join(record)}; known are {known}; messages; prompt, completion; text")


def _alpaca(record: _Record) -> tuple[str, str]:
    """By Stanford Alpaca's templates, without their first sentences."""
    given = f"\n\n### Input:\n{record['input']}" if record.get("input") else ""
    return f"### Instruction:\n{record['instruction']}{given}\n\n### Response:\n", str(record["output"])


def _openbookqa(record: _Record) -> tuple[str, str]:
    letters = "ABCDEFGH"
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, record["choices"], strict=False))
    index = int(record["answer"])
    return f"{record['question']}\n{listed}\nAnswer:", f" {letters[index]}. {record['choices'][index]}"


def _gsm8k(record: _Record) -> tuple[str, str]:
    return f"Question: {record['question']}\nAnswer:", f" {record['answer']}"


def _rte(record: _Record) -> tuple[str, str]:
    words = ("no", "yes")[int(record["label"])]
    return f"{record['premise']}\nDoes it follow that {record['hypothesis']} Yes or no?", f" {words}"


def _sst2(record: _Record) -> tuple[str, str]:
    return f"{record['sentence']}\nSentiment:", f" {('negative', 'positive')[int(record['label'])]}"


# Those with more fields first.
_SETS: tuple[tuple[frozenset[str], Callable[[_Record], tuple[str, str]]], ...] = (
    (frozenset({"instruction", "output"}), _alpaca),
    (frozenset({"question", "choices", "answer"}), _openbookqa),
    (frozenset({"question", "answer"}), _gsm8k),
    (frozenset({"premise", "hypothesis", "label"}), _rte),
    (frozenset({"sentence", "label"}), _sst2),
)
