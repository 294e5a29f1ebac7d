"""Preview of what a job would be trained on: a file's examples, as jobs read them, by token."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coserve.engine.vocabulary import TokenBytes
from coserve.errors import DataError, NothingToTrainError
from coserve.tuning.examples import MAX_FAULTS, Example
from coserve.tuning.objective_examples import each_training_example
from coserve.tuning.objectives import SUPERVISED
from coserve.tuning.reading_report import ReadingReport, Remarks
from coserve.tuning.training_files import TrainingFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SHOWN, _MAX_TOKENS = 3, 2000


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of an example as text, or several that together form a character."""

    text: str
    """Text of the token."""
    is_trained: bool
    """Whether the token is a training target."""


@dataclass(frozen=True, kw_only=True)
class ShownExample:
    """An example that is shown token by token."""

    place: str
    """Place of the example in the file, such as its line."""
    tokens: tuple[Token, ...]
    """First tokens of the example."""
    num_tokens: int
    """Number of all tokens of the example."""
    num_trained: int
    """Number of tokens that are trained on."""
    num_more: int
    """Number of tokens that are not shown."""
    truncated: bool
    """Whether the example was cut to the longest sequence."""


@dataclass(kw_only=True)
class Preview:
    """Contents of a file, or of its beginning."""

    is_whole: bool = True
    """Whether the whole file was read; all numbers count what was read."""
    found: list[Example] = field(default_factory=list)
    """All examples."""
    examples: list[ShownExample] = field(default_factory=list)
    """The first examples, token by token."""
    faults: Remarks = field(default_factory=Remarks)
    """Faults that would fail a job."""
    cut: list[str] = field(default_factory=list)
    """Places of examples that are cut because they are too long."""
    report: ReadingReport = field(default_factory=ReadingReport)
    """Records that are left out, and parts of records that are not trained on."""

    @property
    def num_examples(self) -> int:
        return len(self.found)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.found)

    @property
    def num_trained(self) -> int:
        return sum(example.num_trained for example in self.found)


def read_preview(
    file: TrainingFile,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_sequence_length: int,
    objective: str = SUPERVISED,
    vocab_size: int | None = None,
    end_tokens: Collection[int] = (),
    most_bytes: int | None = None,
    num_shown: int = _MAX_SHOWN,
) -> Preview:
    """Return the contents of a file as a job that is not strict reads it, up to the first ten
    different faults.

    Args:
        file: File to read.
        tokenizer: Tokenizer of the model.
        max_sequence_length: Number of tokens to which each sequence is cut.
        objective: Objective of the job.
        vocab_size: Vocabulary size of the model, if it is known.
        end_tokens: Ids at which generation stops, if they are known.
        most_bytes: Number of bytes to read, rounded up to a whole record (None: all).
        num_shown: Number of examples to show token by token.

    Raises:
        DataError: The file has no examples, or is damaged.
        OSError: The disk fails.
    """
    preview, pieces = Preview(), TokenBytes(tokenizer)

    def beginning() -> Iterator[tuple[str, object]]:
        num_before = 0
        for record in file.records():
            if most_bytes is not None and num_before >= most_bytes:
                preview.is_whole = False
                return
            yield record
            num_before = file.num_bytes_read

    for place, example in each_training_example(
        beginning(),
        tokenizer,
        max_sequence_length=max_sequence_length,
        objective=objective,
        vocab_size=vocab_size,
        end_tokens=end_tokens,
    ):
        if isinstance(example, NothingToTrainError):
            preview.report.left_out.add(place, str(example))
        elif isinstance(example, DataError):
            preview.faults.add(place, str(example))
            if len(preview.faults) == MAX_FAULTS:
                preview.is_whole = False
                break
        else:
            preview.found.append(example)
            for note in example.notes:
                preview.report.warnings.add(place, note)
            if example.truncated:
                preview.cut.append(place)
            if len(preview.examples) < num_shown:
                preview.examples.append(_shown(place, example, pieces))
    if not preview.found and not preview.faults and not preview.report.left_out:
        raise DataError("there is no line with an example")
    return preview


def _shown(place: str, example: Example, pieces: TokenBytes) -> ShownExample:
    return ShownExample(
        place=place,
        tokens=tuple(tokens_of(example, pieces)),
        num_tokens=len(example.tokens),
        num_trained=example.num_trained,
        num_more=max(0, len(example.tokens) - _MAX_TOKENS),
        truncated=example.truncated,
    )


def tokens_of(example: Example, pieces: TokenBytes) -> Iterator[Token]:
    """Yield the text that each of the first tokens adds. The very first token is no target, so it
    counts as not trained.
    """
    trained = (False, *example.trained[1:])[:_MAX_TOKENS]
    waiting = b""
    for place, (token, is_trained) in enumerate(zip(example.tokens, trained, strict=False)):
        waiting += pieces.of(token)
        is_last = place + 1 == len(trained) or trained[place + 1] != is_trained
        if is_last or _is_text(waiting):  # otherwise the next token completes a character
            yield Token(text=waiting.decode("utf-8", "replace"), is_trained=is_trained)
            waiting = b""


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
