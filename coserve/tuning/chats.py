"""Conversations to text, and which of it is trained on: what the chat template marks with `{% generation %}`, where it
marks anything (as transformers' `return_assistant_tokens_mask` and TRL's `assistant_only_loss` have it); else each of
the assistant's turns with the token that ends it. A message of weight 0 is not trained on.

Some templates write a turn otherwise once others follow it (Qwen3 leaves out its reasoning, gpt-oss ends it by another
token). Then a conversation is several texts, so that each turn is learned as a model is asked for it.
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
# An answer's reasoning, by the names that chat templates and servers have for it; the last is gpt-oss's.
REASONING = ("reasoning_content", "reasoning", "thinking")
# What transformers' `apply_chat_template` has parameters for: not to be set as variables of a template.
RESERVED = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "self"),
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# transformers keeps each template once compiled, with what it notes of marks while it renders. This makes a template of
# our own, so that requests that are rendered meanwhile note nothing there; the line end after a comment is not written.
_OURS = "{# of training #}\n"
_one_at_a_time = Lock()

_Text = list[tuple[str, bool]]


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

    def read(self, record: Mapping[str, Any]) -> tuple[Pieces, ...]:
        """The rendered conversation, up to its last turn of the assistant: one text, or several of which each has other
        turns that are trained on.

        Raises:
            DataError: what is wrong with the messages, or that the template does not take them.
        """
        messages, given = _messages(record["messages"]), _given(record)
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        is_marked = _MARK.search(self._template(given)) is not None
        read = self._by_marks if is_marked else self._by_turns
        return tuple(
            Pieces(texts=tuple(piece for piece in text if piece[0]), by_touch=is_marked)
            for text in read(messages[: last + 1], given)
        )

    def _template(self, given: Mapping[str, Any]) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(None, given["tools"])
        except ValueError as error:  # there is none, or none of this name
            raise DataError(" ".join(str(error).split())) from None
        return template

    # -- marks ------------------------------------------------------------------------------

    def _by_marks(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> list[_Text]:
        text, marks = self._marked(messages, given)
        if not any(start < end for start, end in marks):
            raise DataError("the chat template marks nothing of it with {% generation %}")
        unwanted = {
            number
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight") == 0
            for number in range(self._num_marks(messages[:index], given), self._num_marks(messages[: index + 1], given))
        }
        pieces, done = _Text(), 0
        for number, (start, end) in enumerate(marks):
            pieces += [(text[done:start], False), (text[start:end], number not in unwanted)]
            done = end
        return [pieces]

    def _num_marks(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> int:
        return len(self._marked(messages, given)[1]) if messages else 0

    def _marked(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where what is marked begins and ends."""
        from transformers.utils.chat_template_utils import render_jinja_template

        plain = [{name: value for name, value in each.items() if value is not None} for each in _plain(messages)]
        try:
            with _one_at_a_time:
                (text,), (marks,) = render_jinja_template(
                    conversations=[plain],
                    **given,
                    chat_template=_OURS + self._template(given),
                    return_assistant_tokens_mask=True,
                    **self._tokenizer.special_tokens_map,
                )
        except Exception as error:  # templates raise what they like
            raise _refused(error) from error
        return text, marks

    # -- turns ------------------------------------------------------------------------------

    def _by_turns(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> list[_Text]:
        """One text for as long as the turns so far stay as they were written; the turns of the next are new."""
        texts: list[_Text] = [[]]
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._turn(messages[: index + 1], given)
            if not before.startswith(done):
                done = self._continued(texts, done, before)
            if message.get("tool_calls"):
                self._check_calls(messages[: index + 1], given, after)
            turn, gap = self._without_gap(after[len(before) :])
            texts[-1] += [(before[len(done) :], False), (turn, message.get("weight") != 0), (gap, False)]
            done = after
        learned = [text for text in texts if any(is_trained for _, is_trained in text)]
        return learned or texts[-1:]

    def _turn(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> tuple[str, str]:
        """The text up to the last message, an assistant's turn, and with it."""
        asked, after = messages[:-1], self._render(messages, given)
        if not asked:  # there is nothing to ask for an answer to: the turn begins where its text does
            return after[: max(0, after.find(messages[-1].get("content") or ""))], after
        before = self._render(asked, given, add_generation_prompt=True)
        if after.startswith(before):
            return before, after
        # It is asked for with more than this answer begins with, such as an opened reasoning (DeepSeek-R1's distilled).
        begun = self._render(asked, given)
        if not after.startswith(begun):
            raise DataError("the chat template does not render this conversation turn by turn")
        shared = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after))
        ends = [before.rfind(mark, 0, shared) + len(mark) for mark in self._marks if mark in before[:shared]]
        return before[: max(len(begun), *ends)], after

    def _check_calls(self, messages: list[dict[str, Any]], given: Mapping[str, Any], text: str) -> None:
        """DataError if the template knows of no calls, so that their turn would be learned without them."""
        silent = {name: value for name, value in messages[-1].items() if name != "tool_calls"}
        try:
            without = self._render([*messages[:-1], silent], given)
        except DataError:  # it takes no turn that says nothing
            return
        if without == text:
            raise DataError("the chat template writes no tool_calls")

    def _continued(self, texts: list[_Text], done: str, before: str) -> str:
        """Make ready for the next turn, before which what is done is written otherwise; what is done of its text."""
        end = self._tokenizer.eos_token
        if end and done.endswith(end) and before.startswith(short := done.removesuffix(end)):
            (turn, is_trained), _ = texts[-1][-2:]
            turn, gap = self._without_gap(turn.removesuffix(end))
            if turn.endswith(tuple(self._ends)):  # the text has ended there, after the turn (Phi-3)
                texts[-1][-2:] = [(turn, is_trained), (gap, False)]
                return short
        texts.append([])
        return ""

    def _without_gap(self, turn: str) -> tuple[str, str]:
        """A turn up to the token that ends it, and the white space that the template puts between turns: a model never
        writes that, since it has ended.
        """
        end = turn.rstrip()
        if end.endswith(tuple(self._ends)):
            return end, turn[len(end) :]
        return turn, ""

    @cached_property
    def _marks(self) -> list[str]:
        """Where a turn may begin: after the end of a line, or a token that is no part of words."""
        return ["\n", *(token.content for token in self._tokenizer.added_tokens_decoder.values())]

    @cached_property
    def _ends(self) -> list[str]:
        """Special tokens, as text."""
        added = self._tokenizer.added_tokens_decoder.values()
        return [*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)]

    def _render(self, messages: list[dict[str, Any]], given: Mapping[str, Any], **options: Any) -> str:
        plain = _plain(messages)
        try:
            text: str = self._tokenizer.apply_chat_template(plain, tokenize=False, **given, **options)
        except Exception as error:  # templates raise what they like
            raise _refused(error) from error
        return text


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's format as chat templates read it: no weight, developers are the system, reasoning by the
    names that templates have for it, and the arguments of tool calls as objects.

    Raises:
        DataError: tool calls that are none, or arguments that are no JSON object.
    """
    plain = {name: value for name, value in message.items() if name not in ("weight", *REASONING)}
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    if isinstance(thought, str):
        plain |= dict.fromkeys(REASONING, thought)
        if plain.get("content") and plain.get("tool_calls"):
            del plain["thinking"]  # gpt-oss's template, which alone reads it, refuses both beside calls
    if plain.get("content") is None:
        plain["content"] = ""
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError("tool_calls must have a function with a name and arguments each, in a list of objects")
        plain["tool_calls"] = [_template_call(call, f"tool_calls[{index}]") for index, call in enumerate(calls)]
    return plain


def _template_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        raise DataError(f"{place}.function must be an object with a name and arguments")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise DataError(f"{place}.function.arguments is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise DataError(f"{place}.function.arguments must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _given(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is given beside the messages."""
    more = record.get("chat_template_kwargs") or {}
    if not isinstance(more, Mapping) or any(name in RESERVED for name in more):
        raise DataError("chat_template_kwargs must be an object, of variables of the chat template alone")
    return {**more, "tools": record.get("tools")}


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [template_message(message) for message in messages]


def _refused(error: Exception) -> DataError:
    return DataError(f"the chat template refuses it: {' '.join(str(error).split())}")


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
