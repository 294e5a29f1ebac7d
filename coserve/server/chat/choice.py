"""One choice of a chat's answer, as a message or as deltas, from generated text."""

from typing import Any

from coserve.server.chat.answer_reader import AnswerReader, ChatFrame
from coserve.server.chat.tools import Tools
from coserve.server.tool_parsers.base import (
    Arguments,
    CallBegins,
    CallFails,
    Content,
    Part,
    Reasoning,
)

# Names of the reasoning: DeepSeek's and LiteLLM's, and vLLM's.
_REASONING = ("reasoning_content", "reasoning")


class ChatChoice:
    """Incremental builder of one choice.

    A tool call that turns out to be invalid becomes content of the message; a stream, which has
    sent it already, leaves it as it is.
    """

    def __init__(self, tools: Tools, frame: ChatFrame) -> None:
        self._frame, self._reader = frame, AnswerReader(tools, frame)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_begun = 0

    def add(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the delta of further text."""
        delta: dict[str, Any] = {}
        for part in self._reader.push(text, is_last=is_last):
            self._take(part, delta)
        return delta

    def reason(self, reason: str) -> str:
        """Return OpenAI's finish reason."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def message(self) -> dict[str, Any]:
        """Return the complete message."""
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
            self._reasoning.append(part.text)
            for name in _REASONING:
                delta[name] = delta.get(name, "") + part.text
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
        call = {
            "id": self._reader.new_call_id(),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self._calls.append(call)
        delta.setdefault("tool_calls", []).append(
            # Counts failed calls as well: a stream has sent their deltas under these numbers.
            {"index": self._num_begun, **call, "function": {"name": name, "arguments": ""}}
        )
        self._num_begun += 1

    def _delta_of_call(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the delta of the last tool call's function."""
        calls: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
        # An earlier chunk has begun the call.
        if not calls or calls[-1]["index"] != self._num_begun - 1:
            calls.append({"index": self._num_begun - 1, "function": {"arguments": ""}})
        function: dict[str, Any] = calls[-1]["function"]
        return function
