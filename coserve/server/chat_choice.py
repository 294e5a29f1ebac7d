"""One choice of a chat: from the text that the model writes to its message, whole or as deltas."""

from dataclasses import dataclass
from typing import Any

from coserve.server.reasoning import ThinkReader
from coserve.server.tool_parsers.base import Arguments, CallBegins, CallFails, Content, Part, Reasoning
from coserve.server.tools import Tools

# As DeepSeek and LiteLLM name it, and as vLLM does.
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, kw_only=True)
class ChatFrame:
    """What the text of an answer begins in. role: whose message it is. echo: the message that comes before the text.
    inside_reasoning: whether the prompt has opened it. with_reasoning: whether it is part of the answer.
    """

    role: str = "assistant"
    echo: str = ""
    inside_reasoning: bool = False
    with_reasoning: bool = True


class ChatChoice:
    """Takes the text piece by piece. A call that turned out to be none is content of the message; a stream, which has
    sent it already, leaves it as it is.
    """

    def __init__(self, tools: Tools, frame: ChatFrame) -> None:
        self._tools, self._frame = tools, frame
        reads_all = tools.parser is not None and tools.parser.reads_all
        # An answer that has to call does not think first, even if the prompt has opened a reasoning.
        self._think = None if reads_all or tools.must_call else ThinkReader(inside=frame.inside_reasoning)
        self._parser = None if tools.parser is None else tools.parser(tools.names)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_begun = 0

    def add(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The delta that more text makes."""
        parts = self._read(text, is_last=is_last)
        delta: dict[str, Any] = {}
        for part in parts:
            self._take(part, delta)
        return delta

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

    def reason(self, reason: str) -> str:
        """Why it is over, as OpenAI says it."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def message(self) -> dict[str, Any]:
        """All of it."""
        content = self._frame.echo + "".join(self._content)
        message: dict[str, Any] = {"role": self._frame.role, "content": content, "refusal": None}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = self._calls
        if self._reasoning:
            message |= dict.fromkeys(_REASONING, "".join(self._reasoning))
        return message

    def _take(self, part: Part, delta: dict[str, Any]) -> None:
        if isinstance(part, Content):
            self._content.append(part.text)
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            if self._frame.with_reasoning:
                self._reasoning.append(part.text)
                for name in _REASONING:
                    delta[name] = delta.get(name, "") + part.text
        elif self._num_begun + isinstance(part, CallBegins) > 1 and not self._tools.parallel:
            self._num_begun += isinstance(part, CallBegins)
        elif isinstance(part, CallBegins):
            self._begin(part.name, delta)
        elif isinstance(part, Arguments):
            self._calls[-1]["function"]["arguments"] += part.text
            self._delta_of_call(delta)["arguments"] += part.text
        else:
            assert isinstance(part, CallFails)
            self._content.append(part.text)
            del self._calls[-1]

    def _begin(self, name: str, delta: dict[str, Any]) -> None:
        assert self._parser is not None
        call = {"id": self._parser.new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
        self._calls.append(call)
        delta.setdefault("tool_calls", []).append(
            {"index": self._num_begun, **call, "function": {"name": name, "arguments": ""}}
        )
        self._num_begun += 1

    def _delta_of_call(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Of the last call, what a delta says of its function."""
        calls: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
        if not calls or calls[-1]["index"] != self._num_begun - 1:
            calls.append({"index": self._num_begun - 1, "function": {"arguments": ""}})
        found: dict[str, Any] = calls[-1]["function"]
        return found
