"""What a job would be trained on: a file's examples, as jobs read them, token by token."""

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
    """Of an example, as text; of several tokens, where they are parts of one character."""

    text: str
    is_trained: bool


@dataclass(frozen=True, kw_only=True)
class ShownExample:
    """num_more: tokens that are not shown."""

    place: str
    tokens: tuple[Token, ...]
    num_tokens: int
    num_trained: int
    num_more: int
    truncated: bool


@dataclass(kw_only=True)
class Preview:
    """The contents of a file, or of its beginning."""

    is_whole: bool = True
    """Whether all of the file has been read; all numbers are of what has been."""
    found: list[Example] = field(default_factory=list)
    """All examples."""
    examples: list[ShownExample] = field(default_factory=list)
    """The first of them, to be shown."""
    faults: Remarks = field(default_factory=Remarks)
    """Faults at which a job would fail."""
    cut: list[str] = field(default_factory=list)
    """Places of examples that are cut, since they are too long."""
    report: ReadingReport = field(default_factory=ReadingReport)
    """Records that are left out, and parts of records that are not learned."""

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
    """Return what is in a file, as a job that is not strict reads it, up to its first ten different
    faults.

    Args:
        file: The file.
        tokenizer: That of the model.
        max_sequence_length: Tokens to which each sequence is cut.
        objective: What the job learns.
        vocab_size: Of the model, if it is known.
        end_tokens: Ids at which generation stops, if they are known.
        most_bytes: Bytes of the file that are read, give or take a record (None: all).
        num_shown: Examples to show token by token.

    Raises:
        DataError: Nothing of the file can be read, or it is damaged.
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
    """What each of its first tokens adds to the text. The first of all is nobody's target, so it is
    not trained.
    """
    trained = (False, *example.trained[1:])[:_MAX_TOKENS]
    waiting = b""
    for place, (token, is_trained) in enumerate(zip(example.tokens, trained, strict=False)):
        waiting += pieces.of(token)
        is_last = place + 1 == len(trained) or trained[place + 1] != is_trained
        if is_last or _is_text(waiting):  # else the next token has the rest of a character
            yield Token(text=waiting.decode("utf-8", "replace"), is_trained=is_trained)
            waiting = b""


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
