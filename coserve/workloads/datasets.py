"""Fine-tuning sets, as published, as lines for jobs: Alpaca, GSM8K, SST-2, RTE, OpenBookQA.

A set is recognized by its fields; files are JSONL, a JSON array, or tables (GLUE's are TSV), plain
or gzipped. Each record becomes a prompt and a completion, which any tokenizer can take; lines that
are in the format of jobs already stay as they are.
"""

from collections.abc import Callable, Mapping, Sequence
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
            reason = (
                str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            )
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
    raise DataError(
        f"has the fields {', '.join(record)}; known are {known}; messages; prompt, completion; text"
    )


def _alpaca(record: _Record) -> tuple[str, str]:
    """Return a record by Stanford Alpaca's templates, without their first sentences."""
    more = f"\n\n### Input:\n{record['input']}" if record.get("input") else ""
    return f"### Instruction:\n{record['instruction']}{more}\n\n### Response:\n", str(
        record["output"]
    )


def _openbookqa(record: _Record) -> tuple[str, str]:
    choices = [str(choice) for choice in record["choices"]]
    return _choice(str(record["question"]), choices, _class(record["answer"], len(choices)))


def _openbookqa_by_key(record: _Record) -> tuple[str, str]:
    """Return a record as its authors publish it, or as the Hugging Face hub does."""
    if "question_stem" in record:
        stem, choices = record["question_stem"], record["choices"]
        texts, labels = choices["text"], choices["label"]
    else:
        stem, choices = record["question"]["stem"], record["question"]["choices"]
        texts, labels = ([choice[name] for choice in choices] for name in ("text", "label"))
    return _choice(
        str(stem), [str(text) for text in texts], list(labels).index(record["answerKey"])
    )


def _choice(question: str, choices: Sequence[str], right: int) -> tuple[str, str]:
    letters = "ABCDEFGH"
    listed = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=False)
    )
    return f"{question}\n{listed}\nAnswer:", f" {letters[right]}. {choices[right]}"


def _gsm8k(record: _Record) -> tuple[str, str]:
    return f"Question: {record['question']}\nAnswer:", f" {record['answer']}"


def _rte(record: _Record) -> tuple[str, str]:
    """Return a record with GLUE's and SuperGLUE's words as labels; or with 1 for entailment, except
    where there is an `idx`: the hub's SuperGLUE has that, with 0 for entailment.
    """
    label, right = record["label"], 0 if "idx" in record else 1
    follows = label == _ENTAILMENT[0] if label in _ENTAILMENT else _class(label, 2) == right
    return _premise(record["premise"], record["hypothesis"], follows)


def _rte_of_glue(record: _Record) -> tuple[str, str]:
    label = record["label"]
    if label not in _ENTAILMENT:
        raise DataError(
            f"has the label {label!r}, and sentence1 and sentence2 as several sets of GLUE: RTE's "
            f"labels must be "
            f"{' or '.join(_ENTAILMENT)}, or the fields premise, hypothesis and label"
        )
    return _premise(record["sentence1"], record["sentence2"], label == _ENTAILMENT[0])


def _premise(premise: str, hypothesis: str, follows: bool) -> tuple[str, str]:
    return f"{premise}\nDoes it follow that {hypothesis} Yes or no?", " yes" if follows else " no"


def _sst2(record: _Record) -> tuple[str, str]:
    return (
        f"{record['sentence']}\nSentiment:",
        f" {('negative', 'positive')[_class(record['label'], 2)]}",
    )


def _class(label: Any, number: int) -> int:
    """Return a label as an index.

    Raises:
        DataError: The label is of a test set, which has -1, or of another set.
    """
    index = int(label)
    if not 0 <= index < number:
        raise DataError(f"has the label {index}: must be 0 to {number - 1}")
    return index


# Of what follows, and of what does not.
_ENTAILMENT = ("entailment", "not_entailment")
# Those with more fields first.
_SETS: tuple[tuple[frozenset[str], Callable[[_Record], tuple[str, str]]], ...] = (
    (frozenset({"instruction", "output"}), _alpaca),
    (frozenset({"question", "choices", "answer"}), _openbookqa),
    (frozenset({"question_stem", "choices", "answerKey"}), _openbookqa_by_key),
    (frozenset({"question", "answerKey"}), _openbookqa_by_key),
    (frozenset({"question", "answer"}), _gsm8k),
    (frozenset({"premise", "hypothesis", "label"}), _rte),
    (frozenset({"sentence1", "sentence2", "label"}), _rte_of_glue),
    (frozenset({"sentence", "label"}), _sst2),
)
