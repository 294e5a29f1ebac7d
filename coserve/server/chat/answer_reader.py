"""From the text that a model writes to the parts of its answer, in their order: reasoning, content,
calls of tools.
"""

from dataclasses import dataclass

from coserve.server.chat.reasoning import ThinkReader
from coserve.server.chat.tools import Tools
from coserve.server.tool_parsers.base import (
    Arguments,
    CallBegins,
    CallFails,
    Content,
    Part,
    Reasoning,
)


@dataclass(frozen=True, kw_only=True)
class ChatFrame:
    """What the text of an answer begins in. role: whose message it is. echo: the message that comes
    before the text. inside_reasoning: whether the prompt has opened it. may_reason: whether the
    answer may open it. with_reasoning: whether it is part of the answer.
    """

    role: str = "assistant"
    echo: str = ""
    inside_reasoning: bool = False
    may_reason: bool = False
    with_reasoning: bool = True


class AnswerReader:
    """Takes the text of one answer piece by piece. Calls beyond the first are left out where they
    may not be parallel, and reasoning where nobody wants it.
    """

    def __init__(self, tools: Tools, frame: ChatFrame) -> None:
        self._tools, self._frame = tools, frame
        reads_all = tools.parser is not None and tools.parser.reads_all
        self._think = None if reads_all else ThinkReader(inside=frame.inside_reasoning)
        self._parser = None if tools.parser is None else tools.parser(tools.schemas)
        self._num_begun = 0
        self.was_reasoning = False

    def new_call_id(self) -> str:
        """One that the template takes back with the tool's answer."""
        assert self._parser is not None
        return self._parser.new_id()

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """The parts that more text makes. `was_reasoning` says afterwards whether the text was, at
        least at one end.
        """
        before = self._think is not None and self._think.is_inside
        parts = self._read(text, is_last=is_last)
        after = self._think is not None and self._think.is_inside
        self.was_reasoning = before or after or any(isinstance(part, Reasoning) for part in parts)
        return [part for part in parts if self._is_wanted(part)]

    def _read(self, text: str, *, is_last: bool) -> list[Part]:
        parts: list[Part] = [Content(text)] if text else []
        if self._think is not None:
            parts = self._think.push(text) + (self._think.finish() if is_last else [])
        if self._parser is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._parser.push(part.text) if isinstance(part, Content) else [part]
        return found + (self._parser.finish() if is_last else [])

    def _is_wanted(self, part: Part) -> bool:
        if isinstance(part, Reasoning):
            return self._frame.with_reasoning
        self._num_begun += isinstance(part, CallBegins)
        is_of_call = isinstance(part, CallBegins | Arguments | CallFails)
        return not is_of_call or self._num_begun <= 1 or self._tools.parallel
