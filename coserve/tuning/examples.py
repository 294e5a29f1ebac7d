"""Training data: records to tokens, with a mark for each whether it is trained on.

Three kinds of record (`line_formats` makes them of what files have): `messages` (through the
model's chat template, see `chats`), `prompt` and `completion` (the completion is trained on), and
`text` (all of it is). The borders between trained and other text are set on characters, before
tokenization, so that tokens are those of the whole text.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from coserve.errors import DataError, NothingToTrainError
from coserve.tuning.chats import ChatReader, Pieces
from coserve.tuning.json_records import Record, records_of
from coserve.tuning.line_formats import as_chat, as_completion, read_record
from coserve.tuning.reading_report import ReadingReport, Remarks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Read = TypeVar("_Read")
# Different faults of a file that are named.
MAX_FAULTS = 10


@dataclass(frozen=True, kw_only=True)
class Example:
    """One record as tokens.

    Raises:
        ValueError: There are not as many marks as tokens, or the sequences do not add up to these.
    """

    tokens: tuple[int, ...]
    """Token ids."""
    trained: tuple[bool, ...]
    """Mark of each token, whether it is trained on."""
    truncated: bool = False
    """Whether tokens were cut off."""
    parts: tuple[int, ...] = ()
    """Lengths of its sequences, where it has several (a pair of answers, or a conversation as its
    chat template writes it from turn to turn); the first token of each is not trained on.
    """
    labels: tuple[float, ...] = ()
    """Label of each sequence, where the objective needs one."""
    values: tuple[tuple[float, ...], ...] = ()
    """Numbers of each trained token, where the objective needs them."""
    # Remarks about what of the record is not learned; they are not stored.
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.trained):
            raise ValueError(
                f"{len(self.tokens)} tokens came with {len(self.trained)} marks of which are "
                f"trained on"
            )
        if self.parts and sum(self.parts) != len(self.tokens):
            raise ValueError(f"sequences of {self.parts} tokens came with {len(self.tokens)}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of its sequences."""
        return self.parts or (len(self.tokens),)

    @property
    def sequences(self) -> tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]:
        """Return the tokens and marks of each of its sequences."""
        if not self.parts:
            return ((self.tokens, self.trained),)
        ends = tuple(accumulate(self.parts))
        return tuple(
            (self.tokens[start:end], self.trained[start:end])
            for start, end in zip((0, *ends), ends, strict=False)
        )

    @cached_property
    def num_trained(self) -> int:
        """Return the number of rows that will have a target; a sequence's first token is no row's
        target.
        """
        return self.trained[1:].count(True)


def read_examples(
    lines: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_sequence_length: int,
    report: ReadingReport | None = None,
) -> list[Example]:
    """Return each record of a file as an example.

    Args:
        lines: Lines of JSONL, or of one JSON array.
        tokenizer: A fast one.
        max_sequence_length: Tokens to which each sequence is cut.
        report: See `collected`.

    Raises:
        DataError: See `collected`.
    """
    return collected(
        each_example(records_of(lines), tokenizer, max_sequence_length=max_sequence_length), report
    )


def collected(
    found: Iterable[tuple[str, Example | DataError]], report: ReadingReport | None = None
) -> list[Example]:
    """Return the examples of a file.

    Args:
        found: The place of each record with its example, or with what is wrong with it.
        report: Takes remarks about the records; without one, a record of which nothing is left to
            train on is a fault.

    Raises:
        DataError: The message names lines and reasons of the first ten different faults; or no
            example is left.
    """
    report = report or ReadingReport(is_strict=True)
    examples, faults = list[Example](), Remarks()
    for place, each in found:
        if isinstance(each, Example):
            examples.append(each)
            for note in each.notes:
                report.warnings.add(place, note)
        elif isinstance(each, NothingToTrainError) and not report.is_strict:
            report.left_out.add(place, str(each))
        else:
            faults.add(place, str(each))
            if len(faults) == MAX_FAULTS:
                break
    if faults:
        raise DataError("; ".join(faults.lines()))
    if not examples and report.left_out:
        raise DataError("; ".join(report.left_out.lines()) + "; no other example is left")
    if not examples:
        raise DataError("there is no line with an example")
    return examples


def each_example(
    records: Iterable[tuple[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_sequence_length: int,
    end_tokens: Collection[int] = (),
) -> Iterator[tuple[str, Example | DataError]]:
    """Yield the place of each record with its example, or with what is wrong with it.

    Args:
        records: Records of `records_of` or `TrainingFile`, whose errors are raised.
        tokenizer: A fast one.
        max_sequence_length: Tokens to which each sequence is cut.
        end_tokens: Ids at which generation stops, if they are known.

    Raises:
        DataError: The tokenizer is a slow one.
    """
    return each_read(records, Reader(tokenizer, max_sequence_length, end_tokens).read)


def each_read(
    records: Iterable[tuple[str, Any]], read: Callable[[Any], _Read]
) -> Iterator[tuple[str, _Read | DataError]]:
    """Yield the place of each record with what is read of it, or with what is wrong with it."""
    for place, record in records:
        try:
            yield place, read(record)
        except DataError as error:
            yield place, error


class Reader:
    """A reader of records for one tokenizer."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_sequence_length: int,
        end_tokens: Collection[int] = (),
    ) -> None:
        """Begin with a tokenizer.

        Args:
            end_tokens: Ids at which generation stops, if they are known.

        Raises:
            DataError: The tokenizer is a slow one.
        """
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets; use its "
                f"fast version"
            )
        self._tokenizer, self.max_length = tokenizer, max_sequence_length
        self._chats = ChatReader(tokenizer, end_tokens)

    def read(self, given: Any) -> Example:
        """Return the example of a line's text, or of a record.

        Raises:
            DataError: The message says what is wrong with it.
        """
        read, cut = list[Example](), None
        for text in self._texts(read_record(given)):
            try:
                read.append(self.example(text))
            except NothingToTrainError as error:
                cut = error
        if cut is None:
            return together(read)
        if not read:
            raise cut
        return replace(together(read), truncated=True)

    def pieces(self, record: Record) -> Pieces:
        """Return the text of a record (of `read_record`) that is one text.

        Raises:
            DataError: It is several, or something is wrong with it.
        """
        text, *others = self._texts(record)
        if others:
            raise DataError(
                "the chat template rewrites earlier turns, so that one turn alone can be trained "
                "on here"
            )
        return text

    def _texts(self, record: Record) -> tuple[Pieces, ...]:
        record = as_chat(record) if self._tokenizer.chat_template else as_completion(record)
        if "messages" in record:
            return self._chats.read(record)
        if "text" in record:
            return (Pieces(texts=((record["text"], True),), special=True),)
        return (
            Pieces(texts=((record["prompt"], False), (record["completion"], True)), special=True),
        )

    def example(self, of: Pieces) -> Example:
        """Tokenize the whole text. A token belongs to the piece in which its last character lies (a
        word often brings the space before it along), or to any that it touches, where the pieces
        ask for that.
        """
        pieces, special = of.texts, of.special
        text = "".join(piece for piece, _ in pieces)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"has half a character (a lone surrogate) at {error.start}") from None
        encoded = self._tokenizer(
            text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        tokens, trained = list(encoded["input_ids"]), []
        ends = list(accumulate(len(piece) for piece, _ in pieces))
        added = encoded["special_tokens_mask"] if special else [0] * len(tokens)
        for (start, stop), around in zip(encoded["offset_mapping"], added, strict=True):
            # A token of spaces that the tokenizer trims away has no width, and lies in the piece
            # that continues there.
            last = min(bisect_left(ends, max(stop, start + 1)), len(ends) - 1)
            first = min(bisect_right(ends, start), last) if of.by_touch else last
            trained.append(
                not around and any(is_trained for _, is_trained in pieces[first : last + 1])
            )
        eos = self._tokenizer.eos_token_id
        if special and eos is not None:
            if tokens and tokens[-1] == eos and not trained[-1]:
                trained[-1] = pieces[-1][1]
            elif not tokens or tokens[-1] != eos:
                tokens.append(eos)
                trained.append(pieces[-1][1])
        length = min(len(tokens), self.max_length)
        example = Example(
            tokens=tuple(tokens[:length]),
            trained=tuple(trained[:length]),
            truncated=length < len(tokens),
            notes=of.notes,
        )
        if not example.num_trained and example.truncated:
            raise NothingToTrainError(f"has no token to train on within {self.max_length} tokens")
        if not example.num_trained:
            raise NothingToTrainError("has no token to train on")
        return example


def together(sequences: Sequence[Example], *, labels: tuple[float, ...] = ()) -> Example:
    """Return one example of several sequences, the first token of each untrained; a single one
    without labels is returned as it is.
    """
    if len(sequences) == 1 and not labels:
        return sequences[0]
    return Example(
        tokens=tuple(token for each in sequences for token in each.tokens),
        trained=tuple(mark for each in sequences for mark in (False, *each.trained[1:])),
        truncated=any(each.truncated for each in sequences),
        parts=tuple(len(each.tokens) for each in sequences),
        labels=labels,
        notes=tuple(dict.fromkeys(note for each in sequences for note in each.notes)),
    )


def apart(examples: Sequence[Example]) -> Sequence[Example]:
    """Return each sequence of the examples as an example, where they need not stay together."""
    if not any(example.parts for example in examples):
        return examples
    return [
        Example(tokens=tokens, trained=trained)
        for each in examples
        for tokens, trained in each.sequences
    ]


def epoch_order(num_examples: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the order in which an epoch takes the examples: a permutation that only seed and epoch
    decide, or the order of the file.
    """
    order = list(range(num_examples))
    if shuffle:
        Random(f"coserve {seed} {epoch}").shuffle(order)
    return order


def bins_of(examples: Sequence[Example], *, max_rows: int) -> list[list[Example]]:
    """Sort the examples of an optimizer step into bins of at most `max_rows` tokens, one for each
    pack: the longest first, each into the first bin that has room (first-fit decreasing). An
    example longer than that has its own.
    """
    bins: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: len(example.tokens), reverse=True):
        for members in bins:
            if sum(len(member.tokens) for member in members) + len(example.tokens) <= max_rows:
                members.append(example)
                break
        else:
            bins.append([example])
    return bins
