"""Turns of the assistant as requests for them: the prompt is what a server renders for the
conversation up to there, the answer is what a model has to write after it, with the token that ends
it.

A template may write a whole conversation otherwise than it asks for its turns. gpt-oss's leaves out
the analysis before a call of a tool once an answer follows, DeepSeek-R1's opens `<think>` in the
prompt and writes no reasoning at all. The answer is then found in the text of the whole
conversation, where the turn begins, and goes after the prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Self

from coserve.errors import DataError
from coserve.tuning.chat_template import ChatTemplate
from coserve.tuning.stop_tokens import StopTokens
from coserve.tuning.template_messages import REASONING

Message = Mapping[str, Any]
Span = tuple[int, int]

_BEGIN, _END = "<think>", "</think>"
# Between the end of a reasoning and the answer, as DeepSeek-R1 and Qwen3 write them.
_AFTER_REASONING = f"\n{_END}\n\n"
# Stands for any value in a message; no text of a conversation begins with it.
_ANY_VALUE = "\u2426\u2425\u2426"
# Characters before a turn's first value in which its beginning is looked for: the turn's header.
_MAX_HEADER = 256

NOT_WRITTEN = "{} is not learned: the chat template does not write it"
_CLOSED = "reasoning is not learned: the chat template's prompt closes it before the answer"
_FIRST_CALL = (
    "of several tool_calls the first alone is learned: the chat template does not write the others"
)
_MARKS_NOTHING = (
    "a turn is not learned: the chat template marks nothing of it with {% generation %}"
)
_MARKS_NO_END = (
    "the end of turns is not learned: the chat template's {% generation %} marks leave it out"
)
_NO_END = "the end of turns is not learned: the model has no token at which generation stops"
_NO_STOP = (
    "turns end with {}, at which generation does not stop: "
    "add it to eos_token_id in generation_config.json"
)


@dataclass(frozen=True, kw_only=True)
class AskedTurn:
    """A turn of the assistant, after the prompt that it answers."""

    # The text that a server renders for the conversation before the turn.
    prompt: str
    # The answer in pieces, each with whether it is trained on.
    pieces: tuple[tuple[str, bool], ...]
    # Remarks about what is not learned.
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the prompt and the answer."""
        return self.prompt + "".join(piece for piece, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A text that a template writes, and which of it is trained on."""

    text: str
    """The text."""
    # Where marked parts begin and end; None: the template has no marks, and all is trained on.
    marks: tuple[Span, ...] | None = None
    # Whether the reasoning was put in, which the template does not write.
    is_completed: bool = False
    # Whether there is a reasoning that was left out, since the prompt says that there is none.
    is_closed: bool = False

    def after(self, start: int) -> Self:
        """Return what follows a place."""
        marks = self.marks and tuple(
            (max(0, a - start), b - start) for a, b in self.marks if b > start
        )
        return replace(self, text=self.text[start:], marks=marks)

    def after_reasoning(self, reasoning: str) -> Self:
        """Return it after a reasoning, whose beginning the prompt has."""
        lead = reasoning.strip("\n") + _AFTER_REASONING
        rest = self.after(len(self.text) - len(self.text.lstrip("\n")))
        marks = rest.marks and (
            (0, len(lead)),
            *((a + len(lead), b + len(lead)) for a, b in rest.marks),
        )
        return replace(self, text=lead + rest.text, marks=marks, is_completed=True)

    def ended(self, text: str) -> Self:
        """Return it with another end, which is trained on where there are no marks."""
        return replace(self, text=text)

    @property
    def pieces(self) -> tuple[tuple[str, bool], ...]:
        """Return the text in pieces, each with whether it is trained on."""
        if self.marks is None:
            return ((self.text, True),)
        pieces, done = list[tuple[str, bool]](), 0
        for start, end in self.marks:
            pieces += [(self.text[done:start], False), (self.text[start:end], True)]
            done = end
        return (*pieces, (self.text[done:], False))


@dataclass(frozen=True, kw_only=True)
class _Header:
    """A prompt, and the part of it that asks for an answer."""

    prompt: str
    """The prompt."""
    # The text of the conversation before the turn when no answer is asked for.
    history: str = ""
    # Characters at the end of the prompt that the history does not have.
    num_generated: int = 0
    # The beginning of a reasoning at the end of the prompt.
    opened: str = ""

    @property
    def before(self) -> str:
        """Return the prompt without the beginning of a reasoning."""
        return self.prompt.removesuffix(self.opened)


class TurnReader:
    """A reader of the turns of one conversation."""

    def __init__(self, template: ChatTemplate, given: Mapping[str, Any], stops: StopTokens) -> None:
        """Begin a conversation.

        Args:
            given: Variables of the template beside the messages.
        """
        self._template, self._given, self._stops = template, given, stops
        self._is_marked = template.is_marked(given.get("tools"))

    def turn(self, messages: Sequence[Message]) -> AskedTurn:
        """Return the last message, the assistant's, as a request for it.

        Raises:
            DataError: The prompt or the answer cannot be determined.
        """
        header = self._header(messages)
        if header.opened and _thinks_in_content(messages[-1]):
            # As if the reasoning had come in its own field.
            spoken = {**_without_reasoning(messages[-1]), REASONING[0]: _reasoning(messages[-1])}
            messages = [*messages[:-1], spoken]
        whole = self._whole(messages)
        answer = self._answer(messages, header, whole)
        notes = self._notes(messages, whole, answer)
        answer, more = self._ended(answer, messages)
        return AskedTurn(prompt=header.prompt, pieces=answer.pieces, notes=(*notes, *more))

    def _header(self, messages: Sequence[Message]) -> _Header:
        """Return the prompt that asks for the last message."""
        if len(messages) == 1:  # nothing asks for the first message of all
            whole, usual = self._render(messages), self._usual_prompt
            begun = whole[: self._first_value(messages, whole)]
            return _Header(
                prompt=begun[: begun.rfind(usual) + len(usual)]
                if usual and usual in begun
                else begun
            )
        prompt = self._render(messages[:-1], add_generation_prompt=True)
        try:
            history = self._render(messages[:-1])
        except DataError:
            history = ""
        shared = _num_shared(prompt, history)
        place = prompt.rfind(_BEGIN, shared)
        opened = prompt[place:] if place >= 0 and _END not in prompt[place:] else ""
        return _Header(
            prompt=prompt, history=history, num_generated=len(prompt) - shared, opened=opened
        )

    def _answer(self, messages: Sequence[Message], header: _Header, whole: _Written) -> _Written:
        """Return the answer that follows the prompt, by the text of the whole conversation."""
        if whole.text.startswith(header.prompt):
            answer = whole.after(len(header.prompt))
            # After a tool's result, a template may write nothing in its place.
            usual = self._usual_prompt
            return answer.after(len(usual)) if usual and answer.text.startswith(usual) else answer
        start = self._start(messages, header, whole.text)
        if start is not None:
            answer = whole.after(start)
            return _inside_reasoning(answer, _reasoning(messages[-1])) if header.opened else answer
        if (bare := _without_reasoning(messages[-1])) != messages[-1]:
            messages = [*messages[:-1], bare]
            return replace(self._answer(messages, header, self._whole(messages)), is_closed=True)
        raise DataError("the chat template writes the last message otherwise than it asks for it")

    def _start(self, messages: Sequence[Message], header: _Header, whole: str) -> int | None:
        """Return where the answer begins in the text of the whole conversation; None if that cannot
        be determined.

        It is the place in the last turn's header before which most is as at the end of the prompt:
        at least all that the template writes to ask for an answer. There is no header where a
        template continues the message before.
        """
        end, first = self._first_value(messages, whole), _num_shared(header.history, whole)
        if whole.startswith(header.before):
            return len(header.before)
        best, start = max(header.num_generated - len(header.opened), 1) - 1, None
        for place in range(end, max(first, end - _MAX_HEADER) - 1, -1):
            length = _num_shared(reversed(header.before), reversed(whole[:place]))
            if length > best:
                best, start = length, place
        return first if start is None and first == end else start

    def _first_value(self, messages: Sequence[Message], whole: str) -> int:
        """Return where the first value of the last message stands: up to there, any values give the
        same text.
        """
        try:
            other = self._render([*messages[:-1], _with_any_values(messages[-1])])
        except DataError:
            return max(0, whole.rfind(messages[-1].get("content") or ""))
        return _num_shared(whole, other)

    @cached_property
    def _usual_prompt(self) -> str:
        """Return what the template writes after a question to ask for an answer."""
        question: list[Message] = [{"role": "user", "content": _ANY_VALUE}]
        try:
            asked, said = self._render(question, add_generation_prompt=True), self._render(question)
        except DataError:
            return ""
        return asked.removeprefix(said) if asked.startswith(said) else ""

    # -- the end of a turn --------------------------------------------------------------

    def _ended(
        self, answer: _Written, messages: Sequence[Message]
    ) -> tuple[_Written, tuple[str, ...]]:
        """Return the answer up to the token that ends it, and remarks about that."""
        if answer.marks is not None:
            if not answer.marks:
                return answer, (_MARKS_NOTHING,)
            has_end = self._stops.closing(answer.text[: answer.marks[-1][1]]) is not None
            return answer, () if has_end else (_MARKS_NO_END,)
        text = self._stops.closed(answer.text)
        if (last := self._stops.closing(text)) is not None:
            return answer.ended(text), () if self._stops.is_stop(last) else (_NO_STOP.format(last),)
        if (end := self._mark_of_next(messages[-1]) or self._stops.eos) is not None:
            return answer.ended(text + end), ()
        return answer.ended(answer.text), (_NO_END,)

    def _mark_of_next(self, message: Message) -> str | None:
        """Return the mark of the next role with which a template closes a turn, if generation stops
        at it (GLM's).
        """
        question, answer = {"role": "user", "content": _ANY_VALUE}, _without_reasoning(message)
        follows = {"role": "tool"} if message.get("tool_calls") else question
        try:
            done = self._render([question, answer]).rstrip()
            more = self._render([question, answer, {**question, **follows}])
        except DataError:
            return None
        if not more.startswith(done):
            return None
        rest = more[len(done) :]
        gap = len(rest) - len(rest.lstrip())
        stop = self._stops.first_stop(rest[gap:])
        return None if stop is None else rest[:gap] + stop

    # -- what is not learned ------------------------------------------------------------

    def _notes(
        self, messages: Sequence[Message], whole: _Written, answer: _Written
    ) -> tuple[str, ...]:
        """Return a remark about each value of the last message that does not change the text.

        Raises:
            DataError: Calls of tools do not.
        """
        *before, last = messages

        def is_written(other: Message) -> bool:
            try:
                return self._render([*before, other]) != whole.text
            except DataError:  # it takes no turn that says nothing
                return True

        notes, calls = list[str](), last.get("tool_calls")
        name = next((name for name in REASONING if last.get(name)), None)
        if answer.is_closed:
            notes.append(_CLOSED)
        elif answer.is_completed:
            pass
        elif name is not None and not is_written(_without(last, *REASONING)):
            notes.append(NOT_WRITTEN.format(name))
        elif _thinks_in_content(last) and not is_written(_without_reasoning(last)):
            notes.append(NOT_WRITTEN.format(f"{_BEGIN} in content"))
        content = (last.get("content") or "").strip()
        if content not in whole.text and not is_written({**last, "content": _ANY_VALUE}):
            notes.append(NOT_WRITTEN.format("content beside tool_calls" if calls else "content"))
        if not calls:
            return tuple(notes)
        if not is_written(_without(last, "tool_calls")):
            raise DataError(
                "the chat template writes no tool_calls"
                + (" beside content" if last["content"] else "")
            )
        if len(calls) > 1 and not is_written({**last, "tool_calls": calls[:1]}):
            notes.append(_FIRST_CALL)
        return tuple(notes)

    # -- texts --------------------------------------------------------------------------

    def _whole(self, messages: Sequence[Message]) -> _Written:
        if not self._is_marked:
            return _Written(text=self._render(messages))
        text, marks = self._template.marked(messages, self._given)
        return _Written(text=text, marks=tuple(marks))

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return self._template.render(messages, {**self._given, **options})


def _num_shared(first: Iterable[str], second: Iterable[str]) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def _inside_reasoning(answer: _Written, reasoning: str) -> _Written:
    """Return an answer to a prompt that opens a reasoning, with the rest of it."""
    if answer.text.lstrip().startswith(_BEGIN):
        rest = answer.after(answer.text.index(_BEGIN) + len(_BEGIN))
        return rest.after(len(rest.text) - len(rest.text.lstrip("\n")))
    return answer if _END in answer.text else answer.after_reasoning(reasoning)


def _reasoning(message: Message) -> str:
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    if isinstance(thought, str):
        return thought
    if not _thinks_in_content(message):
        return ""
    text: str = message["content"].partition(_END)[0]
    return text.rpartition(_BEGIN)[2].strip()


def _thinks_in_content(message: Message) -> bool:
    return _END in (message.get("content") or "")


def _without_reasoning(message: Message) -> Message:
    """Return a message of the assistant without its reasoning, in fields of its own or in its
    content.
    """
    bare = _without(message, *REASONING)
    if _thinks_in_content(bare):
        bare["content"] = bare["content"].rpartition(_END)[2].lstrip("\n")
    return bare


def _without(message: Message, *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}


def _with_any_values(message: Message) -> Message:
    """Return a message with the same fields, each with a value that no message has."""
    other = dict(message)
    for name in REASONING:
        if message.get(name):
            other[name] = _ANY_VALUE
    if calls := message.get("tool_calls"):
        other["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _ANY_VALUE}} for call in calls
        ]
    if message.get("content") or not calls:
        other["content"] = _ANY_VALUE
    return other
