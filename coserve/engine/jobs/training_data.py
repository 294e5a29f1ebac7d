"""Training data of the Python API, in the forms that it may come in."""

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError
from coserve.settings import shown
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example, collected
from coserve.tuning.json_records import records_of
from coserve.tuning.objective_examples import each_training_example, needs_tokenizer
from coserve.tuning.reading_report import ReadingReport
from coserve.tuning.training_files import TrainingFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

# A training file (`TrainingFile`), lines (as text or as objects), or examples that are tokens
# already.
Data = str | Path | Iterable[str] | Iterable[Mapping[str, Any]] | Iterable[Example]


def read_data(
    data: Data,
    config: TuningConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    model: str,
    end_tokens: Collection[int] = (),
) -> list[Example]:
    """Return each record as an example of the job's objective; warnings about what is not learned
    are logged.

    Args:
        data: A file, lines or examples.
        tokenizer: Tokenizer of the model; examples of token ids need none.
        model: Name of the model.
        end_tokens: Ids at which generation stops.

    Raises:
        DataError: some lines cannot be used, and the message names lines and reasons of the first
            ten different faults; or nothing is left.
    """
    records: Iterable[tuple[str, Any]]
    if isinstance(data, str | Path):
        records = TrainingFile(Path(data)).records()
    elif not isinstance(data, Iterable):
        raise DataError(f"data is a file, lines or examples, not {shown(data)}")
    else:
        lines: list[Any] = list(data)
        if all(isinstance(line, Example) for line in lines):
            return [_cut(example, config.max_sequence_length) for example in lines]
        records = records_of(_json_line(number, line) for number, line in enumerate(lines, 1))
    if tokenizer is None and needs_tokenizer(config.objective):
        raise DataError(f"{model} has no tokenizer: examples must be token ids")
    report = ReadingReport()
    try:
        examples = collected(
            each_training_example(
                records,
                tokenizer,
                max_sequence_length=config.max_sequence_length,
                objective=config.objective,
                end_tokens=end_tokens,
            ),
            report,
        )
    except OSError as error:
        raise DataError(f"{data} cannot be read: {error.strerror}") from None
    for line in report.warnings.lines():
        _log.warning("%s (model %s)", line, model)
    if report.left_out:
        count = report.left_out.num_places
        _log.warning("%d examples were left out: %s", count, "; ".join(report.left_out.lines()))
    return examples


def _json_line(number: int, line: Any) -> str:
    if isinstance(line, str):
        return line
    try:
        return json.dumps(line)
    except (TypeError, ValueError) as error:
        raise DataError(f"line {number}: is not JSON: {error}") from None


def _cut(example: Example, length: int) -> Example:
    """Return an example with each of its sequences cut to this many tokens."""
    if max(example.lengths) <= length:
        return example
    if example.values:
        raise DataError(
            f"an example with values has {len(example.tokens)} tokens, and cannot be cut to "
            f"{length}: "
            "raise max_sequence_length"
        )
    tokens: list[int] = []
    trained: list[bool] = []
    for sequence, marks in example.sequences:
        tokens += sequence[:length]
        trained += marks[:length]
    return replace(
        example,
        tokens=tuple(tokens),
        trained=tuple(trained),
        truncated=True,
        parts=tuple(min(part, length) for part in example.parts),
    )
