"""Training data of every objective: but for the next-token loss, an example is sequences that stay together."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError
from coserve.tuning.chats import Pieces
from coserve.tuning.examples import CutAwayError, Example, Reader, collected, each_example, each_read, together
from coserve.tuning.line_formats import read_record, records_of
from coserve.tuning.objective_formats import read_labelled, read_pair, read_sampled
from coserve.tuning.objectives import SUPERVISED, objective_class

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
    left_out: list[str] | None = None,
) -> list[Example]:
    """Every record of a file as an example of an objective's schema (`Objective.schema`); left_out as of
    `read_examples`.

    Raises:
        DataError: its message names the line and the reason of the first ten faults; or no example is left.
    """
    found = each_objective_example(records_of(lines), tokenizer, schema=schema, max_sequence_length=max_sequence_length)
    return collected(found, left_out)


def needs_tokenizer(objective: str) -> bool:
    """Whether examples of an objective are text; else they are tokens already."""
    kind = objective_class(objective)
    return kind is None or kind.schema != _TOKENS


def each_objective_example(
    records: Iterable[tuple[str, Any]],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    schema: str,
    max_sequence_length: int,
) -> Iterator[tuple[str, Example | DataError]]:
    """As `each_example`, for an objective's schema; without a tokenizer if it needs none."""
    if schema == _TOKENS:
        return each_read(records, lambda given: _sampled(given, max_sequence_length))
    assert tokenizer is not None
    reader = Reader(tokenizer, max_sequence_length)
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
) -> Iterator[tuple[str, Example | DataError]]:
    """The examples of a job with this objective, on a model with a vocabulary of this size: see `each_example`. Without
    a tokenizer if it `needs_tokenizer` not.
    """
    if (kind := objective_class(objective)) is None:
        assert tokenizer is not None
        found = each_example(records, tokenizer, max_sequence_length=max_sequence_length)
    else:
        found = each_objective_example(records, tokenizer, schema=kind.schema, max_sequence_length=max_sequence_length)
    for place, example in found:
        if vocab_size is None or isinstance(example, DataError) or max(example.tokens) < vocab_size:
            yield place, example
        else:
            foreign = f"has token {max(example.tokens)}; the model has {vocab_size}: is this its tokenizer?"
            yield place, DataError(foreign)


def _pair(reader: Reader, given: Any) -> Example:
    chosen, rejected = (reader.example(reader.pieces(read_record(record))) for record in read_pair(given))
    return together([chosen, rejected])


def _labelled(reader: Reader, given: Any) -> tuple[Pieces, bool]:
    record, label = read_labelled(given)
    pieces = reader.pieces(read_record(record))
    if len(pieces.texts) < 2:
        raise DataError("an answer needs a prompt before it")
    return pieces, label


def _with_others(reader: Reader, records: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Example | DataError]]:
    """Each answer, and its prompt with the answer of the next record (arXiv 2402.01306, section 4.1)."""
    answers = list[tuple[str, tuple[Pieces, bool]]]()
    for place, found in each_read(records, lambda given: _labelled(reader, given)):
        if isinstance(found, DataError):
            yield place, found
        else:
            answers.append((place, found))

    def joined(index: int) -> Example:
        (own, label), (other, _) = answers[index][1], answers[(index + 1) % len(answers)][1]
        mixed = replace(own, texts=(*own.texts[: _answer(own)], *other.texts[_answer(other) :]))
        return together([reader.example(own), reader.example(mixed)], labels=(float(label), 0.0))

    yield from each_read(((place, index) for index, (place, _) in enumerate(answers)), joined)


def _answer(pieces: Pieces) -> int:
    """Where the last text that is trained on stands."""
    return max((index for index, (_, is_trained) in enumerate(pieces.texts) if is_trained), default=0)


def _sampled(given: Any, max_length: int) -> Example:
    prompt, completion, values = read_sampled(given)
    if len(prompt) + len(completion) > max_length:  # its advantages are of the whole answer
        raise CutAwayError(f"has {len(prompt) + len(completion)} tokens; max_sequence_length is {max_length}")
    trained = (False,) * len(prompt) + (True,) * len(completion)
    return Example(tokens=(*prompt, *completion), trained=trained, values=tuple(values))
