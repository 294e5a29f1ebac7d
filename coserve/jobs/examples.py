"""Training files to examples, and examples to one compact file that the engine's process reads fast."""

import os
from array import array
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coserve.errors import DataError, JobError
from coserve.jobs.files import lines_of
from coserve.tuning.examples import Example, read_examples
from coserve.tuning.line_formats import records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

_MAX_FAULTS = 10


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """All examples end to end: lengths int32 [examples], tokens int32 and trained uint8 [tokens], truncated uint8
    [examples], as this machine lays them out: the file is for the process next door.
    """

    lengths: bytes
    tokens: bytes
    trained: bytes
    truncated: bytes


def read_training_file(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    max_sequence_length: int,
    vocab_size: int,
    is_wanted: "Callable[[int], bool]" = lambda num_bytes: True,
) -> list[Example]:
    """Every line as an example. Takes as long as tokenizing does, unless it is not wanted any more.

    is_wanted: asked before each line, with the bytes of the file that were read.

    Raises:
        DataError: names the line and the reason of the first ten faults. JobError: it is not wanted any more.
    """
    if tokenizer is None:
        raise DataError("the model has no tokenizer, so that files cannot be trained on")
    try:
        examples = read_examples(_while(is_wanted, lines_of(path)), tokenizer, max_sequence_length=max_sequence_length)
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}") from None
    if any(max(example.tokens) >= vocab_size for example in examples):
        raise DataError("; ".join(_foreign_tokens(path, examples, vocab_size)[:_MAX_FAULTS]))
    return examples


def _while(is_wanted: "Callable[[int], bool]", lines: "Iterable[str]") -> "Iterator[str]":
    num_bytes = 0
    for line in lines:
        if not is_wanted(num_bytes):
            raise JobError("the job was ended before its files had been read")
        yield line
        num_bytes += len(line.encode())


def _foreign_tokens(path: Path, examples: "Sequence[Example]", vocab_size: int) -> list[str]:
    places = [place for place, _ in records_of(lines_of(path))]
    return [
        f"{place}: has token {max(example.tokens)}; the model has {vocab_size}: is this its tokenizer?"
        for place, example in zip(places, examples, strict=True)
        if max(example.tokens) >= vocab_size
    ]


def write_examples_file(path: Path, examples: "Sequence[Example]") -> None:
    """Write them whole, or not at all."""
    packed = _Packed(
        lengths=array("i", [len(example.tokens) for example in examples]).tobytes(),
        tokens=array("i", [token for example in examples for token in example.tokens]).tobytes(),
        trained=bytes(mark for example in examples for mark in example.trained),
        truncated=bytes(example.truncated for example in examples),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as file:
        file.write(msgspec.msgpack.encode(packed))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_examples_file(path: str | Path) -> list[Example]:
    """The inverse; DataError if it is not there or damaged."""
    try:
        packed = msgspec.msgpack.decode(Path(path).read_bytes(), type=_Packed)
        lengths, tokens = array("i"), array("i")
        lengths.frombytes(packed.lengths)
        tokens.frombytes(packed.tokens)
        if sum(lengths) != len(tokens) or len(tokens) != len(packed.trained) or len(lengths) != len(packed.truncated):
            raise ValueError("its parts are not of one length")
    except OSError as error:
        raise DataError(f"the examples in {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataError(f"the examples in {path} are damaged: {error}") from None
    return [
        Example(
            tokens=tuple(tokens[start:end]),
            trained=tuple(mark != 0 for mark in packed.trained[start:end]),
            truncated=cut != 0,
        )
        for (start, end), cut in zip(pairwise(accumulate(lengths, initial=0)), packed.truncated, strict=True)
    ]
