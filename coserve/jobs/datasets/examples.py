"""Conversion of training files to examples, and a compact file of examples that the engine's
process reads fast.
"""

import os
from array import array
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coserve.errors import DataError, JobError
from coserve.tuning.examples import Example, collected
from coserve.tuning.objective_examples import each_training_example, needs_tokenizer
from coserve.tuning.objectives import SUPERVISED
from coserve.tuning.reading_report import ReadingReport
from coserve.tuning.training_files import TrainingFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

_Extras = tuple[tuple[int, ...], tuple[float, ...], tuple[tuple[float, ...], ...]]


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """Examples end to end, in this machine's byte order: the reader is a process of the same
    machine.
    """

    lengths: bytes
    """Number of tokens of each example, int32 [examples]."""
    tokens: bytes
    """Token ids of all examples, int32 [tokens]."""
    trained: bytes
    """Whether each token is trained on, uint8 [tokens]."""
    truncated: bytes
    """Whether each example was cut, uint8 [examples]."""
    extras: list[_Extras] = []
    """Parts, labels and values of each example; empty if no example has any."""


def read_training_file(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    max_sequence_length: int,
    vocab_size: int,
    name: str = "",
    objective: str = SUPERVISED,
    end_tokens: "Collection[int]" = (),
    report: ReadingReport | None = None,
    is_wanted: "Callable[[int], bool]" = lambda num_bytes: True,
) -> list[Example]:
    """Return the examples of a training file, one per record; this takes as long as tokenizing
    does.

    Args:
        path: File to read.
        tokenizer: Tokenizer of the model; None suffices if the objective's records are tokens.
        max_sequence_length: Number of tokens to which each sequence is cut.
        vocab_size: Vocabulary size of the model.
        name: Name of the file as its owner gave it, see `TrainingFile`.
        objective: Objective of the job.
        end_tokens: Ids at which generation stops, if they are known.
        report: Collects remarks about the records, see `collected`.
        is_wanted: Called before each record with the number of bytes read so far; returns whether
            to continue.

    Raises:
        DataError: The message names lines and reasons of the first ten different faults.
        JobError: `is_wanted` returned False.
    """
    if tokenizer is None and needs_tokenizer(objective):
        raise DataError("the model has no tokenizer, so that files cannot be trained on")
    file = TrainingFile(path, name)
    try:
        examples = each_training_example(
            _while(is_wanted, file),
            tokenizer,
            max_sequence_length=max_sequence_length,
            objective=objective,
            vocab_size=vocab_size,
            end_tokens=end_tokens,
        )
        return collected(examples, report)
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}") from None


def _while(is_wanted: "Callable[[int], bool]", file: TrainingFile) -> "Iterator[tuple[str, Any]]":
    num_before = 0
    for record in file.records():
        if not is_wanted(num_before):
            raise JobError("the job was ended before its files had been read")
        yield record
        num_before = file.num_bytes_read


def write_examples_file(path: Path, examples: "Sequence[Example]") -> None:
    """Write examples to a file, whole or not at all."""
    packed = _Packed(
        lengths=array("i", [len(example.tokens) for example in examples]).tobytes(),
        tokens=array("i", [token for example in examples for token in example.tokens]).tobytes(),
        trained=bytes(mark for example in examples for mark in example.trained),
        truncated=bytes(example.truncated for example in examples),
        extras=[(example.parts, example.labels, example.values) for example in examples]
        if any(example.parts or example.labels or example.values for example in examples)
        else [],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as file:
        file.write(msgspec.msgpack.encode(packed))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_examples_file(path: str | Path) -> list[Example]:
    """Read the examples that `write_examples_file` has written.

    Raises:
        DataError: The file does not exist, or is damaged.
    """
    try:
        packed = msgspec.msgpack.decode(Path(path).read_bytes(), type=_Packed)
        lengths, tokens = array("i"), array("i")
        lengths.frombytes(packed.lengths)
        tokens.frombytes(packed.tokens)
        if (
            sum(lengths) != len(tokens)
            or len(tokens) != len(packed.trained)
            or len(lengths) != len(packed.truncated)
        ):
            raise ValueError("its parts differ in length")
    except OSError as error:
        raise DataError(f"the examples in {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataError(f"the examples in {path} are damaged: {error}") from None
    bounds = pairwise(accumulate(lengths, initial=0))
    extras = packed.extras or [((), (), ())] * len(lengths)
    examples = []
    for (start, end), cut, (parts, labels, values) in zip(
        bounds, packed.truncated, extras, strict=True
    ):
        example = Example(
            tokens=tuple(tokens[start:end]),
            trained=tuple(mark != 0 for mark in packed.trained[start:end]),
            truncated=cut != 0,
            parts=parts,
            labels=labels,
            values=values,
        )
        examples.append(example)
    return examples
