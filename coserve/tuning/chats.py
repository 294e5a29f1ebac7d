"""Conversations to text, and which of it is trained on: each turn of the assistant as a request for
it.

Where the chat template marks anything with `{% generation %}`, what it marks of a turn is trained
on (as transformers' `return_assistant_tokens_mask` and TRL's `assistant_only_loss` do it); else the
answer with the token that ends it. A turn of weight 0 is not trained on.

A conversation is one text for as long as the prompt of each turn begins with all that came before.
Where the template writes earlier turns otherwise than it asked for them (Qwen3 and gpt-oss leave
reasoning out), the next text begins.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError, NothingToTrainError
from coserve.tuning.asked_turns import NOT_WRITTEN, TurnReader
from coserve.tuning.chat_template import ChatTemplate
from coserve.tuning.stop_tokens import StopTokens
from coserve.tuning.template_messages import RESERVED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A conversation is rendered once for each of its turns, up to there: the time grows with the
# square.
_MAX_MESSAGES = 500
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A text in pieces, and which of them are trained on."""

    texts: tuple[tuple[str, bool], ...]
    """Pieces of the text, each with whether it is trained on."""
    # Whether the tokenizer adds what it puts around a text, and an end-of-text token that is
    # trained with the last piece.
    special: bool = False
    # Whether a token is trained on with any character that is, as transformers takes marks; else
    # with its last one.
    by_touch: bool = False
    # Remarks about what of a record is not learned.
    notes: tuple[str, ...] = ()


class ChatReader:
    """A reader of the conversations of one tokenizer."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", end_tokens: Collection[int] = ()
    ) -> None:
        """end_tokens: ids at which generation stops beside the tokenizer's own end-of-text token,
        if they are known.
        """
        self._template = ChatTemplate(tokenizer)
        self._stops = StopTokens(tokenizer, end_tokens)

    def read(self, record: Mapping[str, Any]) -> tuple[Pieces, ...]:
        """Return the rendered conversation, up to its last turn that is trained on: one text, or
        several, each of which has other turns that are trained on.

        Raises:
            DataError: The messages are wrong, or the template does not take them.
            NothingToTrainError: No turn is trained on.
        """
        messages, variables = _messages(record["messages"]), _given(record)
        texts, notes, done = list[list[tuple[str, bool]]](), dict[str, None](), ""
        reader = TurnReader(self._template, variables, self._stops)
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            turn = reader.turn(messages[: index + 1])
            if not texts or not turn.prompt.startswith(done):
                texts.append([])
                done = ""
            texts[-1] += [(turn.prompt[len(done) :], False), *turn.pieces]
            notes |= dict.fromkeys(turn.notes)
            done = turn.text
        if not texts:
            raise NothingToTrainError(
                "has no turn to train on: each message of the assistant has weight 0"
            )
        if variables["tools"] and not self._writes_tools(messages, variables):
            notes[NOT_WRITTEN.format("tools")] = None
        return self._pieces(
            texts, tuple(notes), by_touch=self._template.is_marked(variables["tools"])
        )

    def _pieces(
        self, texts: list[list[tuple[str, bool]]], notes: tuple[str, ...], *, by_touch: bool
    ) -> tuple[Pieces, ...]:
        """Return the texts without empty pieces and without what follows the last one that is
        trained on.
        """
        rendered = list[Pieces]()
        for text in texts:
            pieces = [piece for piece in text if piece[0]]
            while pieces and not pieces[-1][1]:
                pieces.pop()
            if pieces:
                rendered.append(Pieces(texts=tuple(pieces), by_touch=by_touch, notes=notes))
        if not rendered:
            raise DataError("the chat template marks nothing of it with {% generation %}")
        return tuple(rendered)

    def _writes_tools(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> bool:
        try:
            return self._template.render(messages, given) != self._template.render(
                messages, {**given, "tools": None}
            )
        except DataError:
            return True


def _given(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template gets beside the messages; DataError for a variable that it must not
    get.
    """
    more = record.get("chat_template_kwargs") or {}
    if not isinstance(more, Mapping) or any(name in RESERVED for name in more):
        raise DataError(
            "chat_template_kwargs must be an object, of variables of the chat template alone"
        )
    return {**more, "tools": record.get("tools")}


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a record; DataError names what is wrong with one."""
    if not isinstance(value, list) or not value:
        raise DataError("messages must be a list that is not empty")
    if len(value) > _MAX_MESSAGES:
        raise DataError(
            f"has {len(value)} messages; at most {_MAX_MESSAGES} are read: split the conversation"
        )
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise DataError(f"messages[{index}] must be an object")
        if message.get("role") not in _ROLES:
            raise DataError(
                f"messages[{index}].role must be one of {', '.join(_ROLES)}, not "
                f"{message.get('role')!r}"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f"messages[{index}].content must be a string")
        if message.get("weight") not in (None, 0, 1):
            raise DataError(f"messages[{index}].weight must be 0 or 1, not {message['weight']!r}")
    if not any(message["role"] == "assistant" for message in value):
        raise DataError("messages has no turn of the assistant to train on")
    return value
