"""Reader of generated text, which splits it into reasoning, content and tool calls, in order."""

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
    """Context in which the text of an answer begins."""

    role: str = "assistant"
    """Role of the answer's message."""
    echo: str = ""
    """Message that precedes the generated text in the answer."""
    inside_reasoning: bool = False
    """Whether the prompt has opened the reasoning."""
    may_reason: bool = False
    """Whether the answer may open a reasoning."""
    with_reasoning: bool = True
    """Whether reasoning is part of the answer."""


class AnswerReader:
    """Incremental reader of the text of one answer.

    It drops tool calls after the first where they may not be parallel, and reasoning that was not
    asked for.
    """

    def __init__(self, tools: Tools, frame: ChatFrame) -> None:
        self._tools, self._frame = tools, frame
        reads_all = tools.parser is not None and tools.parser.reads_all
        self._think = None if reads_all else ThinkReader(inside=frame.inside_reasoning)
        self._parser = None if tools.parser is None else tools.parser(tools.schemas)
        self._num_begun = 0
        self.was_reasoning = False

    def new_call_id(self) -> str:
        """Return a new id of a tool call, which the chat template accepts in the tool's answer."""
        assert self._parser is not None
        return self._parser.new_id()

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """Return the parts that further text completes.

        Afterwards, `was_reasoning` says whether the text was reasoning at its beginning or its end.
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
        read: list[Part] = []
        for part in parts:
            read += self._parser.push(part.text) if isinstance(part, Content) else [part]
        return read + (self._parser.finish() if is_last else [])

    def _is_wanted(self, part: Part) -> bool:
        if isinstance(part, Reasoning):
            return self._frame.with_reasoning
        self._num_begun += isinstance(part, CallBegins)
        is_of_call = isinstance(part, CallBegins | Arguments | CallFails)
        return not is_of_call or self._num_begun <= 1 or self._tools.parallel
