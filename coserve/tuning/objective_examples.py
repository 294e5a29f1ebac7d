"""Training data of every objective; for all but the next-token loss, an example is sequences that
stay together.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError, NothingToTrainError
from coserve.tuning.chats import Pieces
from coserve.tuning.examples import Example, Reader, collected, each_example, each_read, together
from coserve.tuning.json_records import records_of
from coserve.tuning.line_formats import read_record
from coserve.tuning.objective_formats import read_labelled, read_pair, read_sampled
from coserve.tuning.objectives import SUPERVISED, objective_class
from coserve.tuning.reading_report import ReadingReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The schema whose lines are tokens.
_TOKENS = "sampled"


def read_objective_examples(
    lines: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    schema: str,
    max_sequence_length: int,
    report: ReadingReport | None = None,
) -> list[Example]:
    """Return each record of a file as an example of an objective's schema (`Objective.schema`); see
    `read_examples`.
    """
    examples = each_objective_example(
        records_of(lines), tokenizer, schema=schema, max_sequence_length=max_sequence_length
    )
    return collected(examples, report)


def needs_tokenizer(objective: str) -> bool:
    """Return whether examples of an objective are text; otherwise they are tokens already."""
    kind = objective_class(objective)
    return kind is None or kind.schema != _TOKENS


def each_objective_example(
    records: Iterable[tuple[str, Any]],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    schema: str,
    max_sequence_length: int,
    end_tokens: Collection[int] = (),
) -> Iterator[tuple[str, Example | DataError]]:
    """Yield examples of an objective's schema as `each_example` does; without a tokenizer if the
    schema needs none.
    """
    if schema == _TOKENS:
        return each_read(records, lambda given: _sampled(given, max_sequence_length))
    assert tokenizer is not None
    reader = Reader(tokenizer, max_sequence_length, end_tokens)
    if schema == "labelled":
        return _with_others(reader, records)
    return each_read(records, lambda given: _pair(reader, given))


def each_training_example(
    records: Iterable[tuple[str, Any]],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    max_sequence_length: int,
    objective: str = SUPERVISED,
    vocab_size: int | None = None,
    end_tokens: Collection[int] = (),
) -> Iterator[tuple[str, Example | DataError]]:
    """Yield the examples of a job as `each_example` does.

    Args:
        records: Records of `records_of` or `TrainingFile`.
        tokenizer: None is enough where `needs_tokenizer` is false.
        max_sequence_length: Tokens to which each sequence is cut.
        objective: What the job learns.
        vocab_size: Examples with a token that a model of this size does not have are faults.
        end_tokens: Ids at which generation stops, if they are known.
    """
    if (kind := objective_class(objective)) is None:
        assert tokenizer is not None
        examples = each_example(
            records, tokenizer, max_sequence_length=max_sequence_length, end_tokens=end_tokens
        )
    else:
        examples = each_objective_example(
            records,
            tokenizer,
            schema=kind.schema,
            max_sequence_length=max_sequence_length,
            end_tokens=end_tokens,
        )
    for place, example in examples:
        if vocab_size is None or isinstance(example, DataError) or max(example.tokens) < vocab_size:
            yield place, example
        else:
            foreign = (
                f"has token {max(example.tokens)}; the model has {vocab_size}: "
                "is this its tokenizer?"
            )
            yield place, DataError(foreign)


def _pair(reader: Reader, given: Any) -> Example:
    chosen, rejected = (
        reader.example(reader.pieces(read_record(record))) for record in read_pair(given)
    )
    return together([chosen, rejected])


def _labelled(reader: Reader, given: Any) -> tuple[Pieces, bool]:
    record, label = read_labelled(given)
    pieces = reader.pieces(read_record(record))
    if len(pieces.texts) < 2:
        raise DataError("an answer needs a prompt before it")
    return pieces, label


def _with_others(
    reader: Reader, records: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, Example | DataError]]:
    """Yield each answer with its prompt and the answer of the next record (arXiv 2402.01306,
    section 4.1).
    """
    answers = list[tuple[str, tuple[Pieces, bool]]]()
    for place, answer in each_read(records, lambda given: _labelled(reader, given)):
        if isinstance(answer, DataError):
            yield place, answer
        else:
            answers.append((place, answer))

    def joined(index: int) -> Example:
        (own, label), (other, _) = answers[index][1], answers[(index + 1) % len(answers)][1]
        mixed = replace(own, texts=(*own.texts[: _answer(own)], *other.texts[_answer(other) :]))
        return together([reader.example(own), reader.example(mixed)], labels=(float(label), 0.0))

    yield from each_read(((place, index) for index, (place, _) in enumerate(answers)), joined)


def _answer(pieces: Pieces) -> int:
    """Return the index of the last text that is trained on."""
    return max(
        (index for index, (_, is_trained) in enumerate(pieces.texts) if is_trained), default=0
    )


def _sampled(given: Any, max_length: int) -> Example:
    prompt, completion, values = read_sampled(given)
    if len(prompt) + len(completion) > max_length:  # its advantages are of the whole answer
        raise NothingToTrainError(
            f"has {len(prompt) + len(completion)} tokens; max_sequence_length is {max_length}"
        )
    trained = (False,) * len(prompt) + (True,) * len(completion)
    return Example(tokens=(*prompt, *completion), trained=trained, values=tuple(values))
