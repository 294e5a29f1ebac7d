"""Conversations to text, and which of it is trained on: what the chat template marks with `{% generation %}`, where it
marks anything (as transformers' `return_assistant_tokens_mask` and TRL's `assistant_only_loss` have it); else each of
the assistant's turns with the token that ends it. A message of weight 0 is not trained on.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from coserve.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without marks a conversation is rendered once for each of its turns, up to there: the time grows with the square.
_MAX_MESSAGES = 500
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# transformers keeps each template once compiled, with what it notes of marks while it renders. This makes a template of
# our own, so that requests that are rendered meanwhile note nothing there; the line end after a comment is not written.
_OURS = "{# of training #}\n"
_one_at_a_time = Lock()


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A text in pieces, and which of them are trained on. special: whether what the tokenizer puts around a text is to
    be added, and an end-of-text token that is trained with the last piece. by_touch: a token is trained on with any
    character that is, as transformers takes marks; else with its last one.
    """

    texts: tuple[tuple[str, bool], ...]
    special: bool = False
    by_touch: bool = False


class ChatReader:
    """The conversations of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def read(self, record: Mapping[str, Any]) -> Pieces:
        """The rendered conversation, up to its last turn of the assistant.

        Raises:
            DataError: what is wrong with the messages, or that the template does not take them.
        """
        messages, tools = _messages(record["messages"]), record.get("tools")
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        is_marked = _MARK.search(self._template(tools)) is not None
        read = self._by_marks if is_marked else self._by_turns
        return Pieces(texts=tuple(piece for piece in read(messages[: last + 1], tools) if piece[0]), by_touch=is_marked)

    def _template(self, tools: Any) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(None, tools)
        except ValueError as error:  # there is none, or none of this name
            raise DataError(" ".join(str(error).split())) from None
        return template

    # -- marks ------------------------------------------------------------------------------

    def _by_marks(self, messages: list[dict[str, Any]], tools: Any) -> list[tuple[str, bool]]:
        text, marks = self._marked(messages, tools)
        if not any(start < end for start, end in marks):
            raise DataError("the chat template marks nothing of it with {% generation %}")
        unwanted = {
            number
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight") == 0
            for number in range(self._num_marks(messages[:index], tools), self._num_marks(messages[: index + 1], tools))
        }
        pieces, done = list[tuple[str, bool]](), 0
        for number, (start, end) in enumerate(marks):
            pieces += [(text[done:start], False), (text[start:end], number not in unwanted)]
            done = end
        return pieces

    def _num_marks(self, messages: list[dict[str, Any]], tools: Any) -> int:
        return len(self._marked(messages, tools)[1]) if messages else 0

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where what is marked begins and ends."""
        from transformers.utils.chat_template_utils import render_jinja_template

        plain = [{name: value for name, value in each.items() if value is not None} for each in _plain(messages)]
        try:
            with _one_at_a_time:
                (text,), (marks,) = render_jinja_template(
                    conversations=[plain],
                    tools=tools,
                    chat_template=_OURS + self._template(tools),
                    return_assistant_tokens_mask=True,
                    **self._tokenizer.special_tokens_map,
                )
        except Exception as error:  # templates raise what they like
            raise _refused(error) from error
        return text, marks

    # -- turns ------------------------------------------------------------------------------

    def _by_turns(self, messages: list[dict[str, Any]], tools: Any) -> list[tuple[str, bool]]:
        pieces, done = list[tuple[str, bool]](), ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = self._render(messages[: index + 1], tools)
            if index:
                before = self._render(messages[:index], tools, add_generation_prompt=True)
            else:  # there is nothing to ask for an answer to: the turn begins where its text does
                before = after[: max(0, after.find(message.get("content") or ""))]
            if not after.startswith(before) or not before.startswith(done):
                raise DataError("the chat template does not render this conversation turn by turn")
            turn, gap = self._without_gap(after[len(before) :])
            pieces += [(before[len(done) :], False), (turn, message.get("weight") != 0), (gap, False)]
            done = after
        return pieces

    def _without_gap(self, turn: str) -> tuple[str, str]:
        """A turn up to the token that ends it, and the white space that the template puts between turns: a model never
        writes that, since it has ended.
        """
        end = turn.rstrip()
        if end.endswith(tuple(self._ends)):
            return end, turn[len(end) :]
        return turn, ""

    @cached_property
    def _ends(self) -> list[str]:
        """Special tokens, as text."""
        added = self._tokenizer.added_tokens_decoder.values()
        return [*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)]

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        plain = _plain(messages)
        try:
            text: str = self._tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, **options)
        except Exception as error:  # templates raise what they like
            raise _refused(error) from error
        return text


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


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [template_message(message) for message in messages]


def _refused(error: Exception) -> DataError:
    return DataError(f"the chat template refuses it: {' '.join(str(error).split())}")


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
