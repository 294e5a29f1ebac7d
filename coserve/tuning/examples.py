"""Training data: records to tokens and which of them are trained on.

Three kinds of record (`line_formats` makes them of what files have): `messages` (through the model's chat template; the
assistant's turns are trained on, unless their `weight` is 0), `prompt` and `completion` (the completion is), and `text`
(all of it is). Where a conversation is cut into trained and other text is decided on characters, before tokenization,
so that tokens are those of the whole text.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError
from coserve.tuning.line_formats import as_chat, as_completion, read_record, records_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_FAULTS = 10
# A conversation is rendered once for each of its turns, up to there: the time grows with the square.
_MAX_MESSAGES = 500
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One line: token ids, and for each whether it is trained on; ValueError if those are not as many."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    truncated: bool = False

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.trained):
            raise ValueError(f"{len(self.tokens)} tokens came with {len(self.trained)} marks of which are trained on")

    @property
    def num_trained(self) -> int:
        """Rows that will have a target: a sequence's first token is nobody's."""
        return self.trained[1:].count(True)


def read_examples(
    lines: Iterable[str], tokenizer: "PreTrainedTokenizerBase", *, max_sequence_length: int
) -> list[Example]:
    """Every record of a file as an example, cut to at most `max_sequence_length` tokens. lines: of JSONL, or of one
    JSON array.

    Raises:
        DataError: its message names the line and the reason of the first ten faults.
    """
    reader, examples, faults = _Reader(tokenizer, max_sequence_length), [], []
    for place, given in records_of(lines):
        try:
            examples.append(reader.read(given))
        except DataError as error:
            faults.append(f"{place}: {error}")
            if len(faults) == _MAX_FAULTS:
                break
    if faults:
        raise DataError("; ".join(faults))
    if not examples:
        raise DataError("there is no line with an example")
    return examples


class _Reader:
    """Reads lines for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_sequence_length: int) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets; use its fast version"
            )
        self._tokenizer, self._max_length = tokenizer, max_sequence_length

    def read(self, given: Any) -> Example:
        """given: a line, or a record. DataError says what is wrong with it."""
        record = read_record(given)
        record = as_chat(record) if self._tokenizer.chat_template else as_completion(record)
        if "messages" in record:
            return self._example(self._chat(record), special=False)
        if "text" in record:
            return self._example([(record["text"], True)], special=True)
        return self._example([(record["prompt"], False), (record["completion"], True)], special=True)

    def _chat(self, record: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """The rendered conversation in pieces: each assistant turn, and what lies before it."""
        messages = _messages(record["messages"])
        pieces, done = [], ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = self._render(messages[: index + 1], record.get("tools"))
            if index:
                before = self._render(messages[:index], record.get("tools"), add_generation_prompt=True)
            else:  # there is nothing to ask for an answer to: the turn begins where its text does
                before = after[: max(0, after.find(message.get("content") or ""))]
            if not after.startswith(before) or not before.startswith(done):
                raise DataError("the chat template does not render this conversation turn by turn")
            pieces += [(before[len(done) :], False), (after[len(before) :], message.get("weight") != 0)]
            done = after
        return pieces

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        plain = [template_message(message) for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, **options)
        except Exception as error:  # templates raise what they like
            raise DataError(f"the chat template refuses it: {' '.join(str(error).split())}") from error
        return text

    def _example(self, pieces: Sequence[tuple[str, bool]], *, special: bool) -> Example:
        """Tokenize the whole text; a token belongs to the piece that its last character lies in (a word often brings
        the space before it along).

        special: add what the tokenizer puts around a text, and an end-of-text token that is trained with the last
        piece.
        """
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
            # A token of spaces that the tokenizer trims away has no width, and lies in the piece that continues there.
            last = stop if stop > start else stop + 1
            place = min(bisect_left(ends, last), len(ends) - 1)
            trained.append(not around and pieces[place][1])
        eos = self._tokenizer.eos_token_id
        if special and eos is not None:
            if tokens and tokens[-1] == eos and not trained[-1]:
                trained[-1] = pieces[-1][1]
            elif not tokens or tokens[-1] != eos:
                tokens.append(eos)
                trained.append(pieces[-1][1])
        length = min(len(tokens), self._max_length)
        example = Example(
            tokens=tuple(tokens[:length]), trained=tuple(trained[:length]), truncated=length < len(tokens)
        )
        if not example.num_trained:
            reason = f" within {self._max_length} tokens" if example.truncated else ""
            raise DataError(f"has no token to train on{reason}")
        return example


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's format as chat templates read it: no weight, and the arguments of tool calls as objects.

    Raises:
        DataError: tool calls that are none, or arguments that are no JSON object.
    """
    plain = {name: value for name, value in message.items() if name != "weight"}
    if calls := message.get("tool_calls"):
        try:
            plain["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
                for call in calls
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"tool_calls must have a function with a name and JSON arguments: {error!r}") from None
    return plain


def _arguments(value: Any) -> dict[str, Any]:
    arguments = json.loads(value or "{}") if isinstance(value, str) else value
    if not isinstance(arguments, dict):
        raise ValueError(f"{value!r} is no JSON object")
    return arguments


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError("messages must be a list that is not empty")
    if len(value) > _MAX_MESSAGES:
        raise DataError(f"has {len(value)} messages; at most {_MAX_MESSAGES} are read: split the conversation")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise DataError(f"messages[{index}] must be an object")
        if message.get("role") not in _ROLES:
            raise DataError(f"messages[{index}].role must be one of {', '.join(_ROLES)}, not {message.get('role')!r}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f"messages[{index}].content must be a string")
        if message.get("weight") not in (None, 0, 1):
            raise DataError(f"messages[{index}].weight must be 0 or 1, not {message['weight']!r}")
    if not any(message["role"] == "assistant" for message in value):
        raise DataError("messages has no turn of the assistant to train on")
    return value


def epoch_order(num_examples: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order in which an epoch takes the examples: a permutation that only seed and epoch decide, or as they
    stand.
    """
    order = list(range(num_examples))
    if shuffle:
        Random(f"coserve {seed} {epoch}").shuffle(order)
    return order


def bins_of(examples: Sequence[Example], *, max_rows: int) -> list[list[Example]]:
    """Sort the examples of an optimizer step into bins of at most `max_rows` tokens, one for each pack: the longest
    first, each into the first bin that has room (first-fit decreasing). An example longer than that has its own.
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
