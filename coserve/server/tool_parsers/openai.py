"""Parser for gpt-oss, which writes messages in channels (https://github.com/openai/harmony).

`<|channel|>analysis<|message|>` is reasoning, a message to `functions.NAME` is a call, and all else
is content. The name is vLLM's.
"""

import re
from collections.abc import Mapping
from typing import Any

from coserve.server.tool_parsers._json_call import JsonArguments
from coserve.server.tool_parsers.base import Content, JsonCalls, Reasoning, num_held

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class OpenAI(JsonCalls):
    """Parser of messages with heads; an answer begins in the head of the first."""

    markers = (_CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    reads_all = True

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._in_head, self._head = True, ""
        self._kind: type[Content] | type[Reasoning] = Content
        self._call: JsonArguments | None = None
        self._num_messages = 0

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        return f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}", ""

    def _step(self) -> bool:
        return self._step_in_head() if self._in_head else self._step_in_body()

    def _step_in_head(self) -> bool:
        if not self._num_messages and not self._can_be_head():
            self._in_head = False  # no channels at all: plain text
            return True
        head, marker, rest = self._rest.partition(_MESSAGE)
        if not marker:
            return False
        self._rest, self._in_head = rest, False
        self._num_messages += 1
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        self._call, self._kind = None, Content
        if recipient is not None and recipient[1] in self._names:
            self._call = JsonArguments(recipient[1], head + _MESSAGE)
        elif recipient is None and channel is not None and channel[1] == "analysis":
            self._kind = Reasoning
        elif recipient is not None:
            self._add(Content(head + _MESSAGE))  # a call of an unknown function
        return True

    def _can_be_head(self) -> bool:
        """Return whether the beginning of the answer can be that of a head."""
        text = self._rest.lstrip()
        begins = (_CHANNEL, _START, _MESSAGE, "to=")
        return not text or any(each.startswith(text[: len(each)]) for each in begins)

    def _step_in_body(self) -> bool:
        places = [(place, marker) for marker in _ENDS if (place := self._rest.find(marker)) >= 0]
        place, marker = min(places, default=(len(self._rest) - num_held(self._rest, _ENDS), ""))
        self._add_body(self._rest[:place])
        self._rest = self._rest[place + len(marker) :]
        if not marker:
            return False
        self._end_body()
        self._in_head = True
        return True

    def _add_body(self, text: str) -> None:
        if self._call is not None and not self._call.is_complete:
            parts, text = self._call.push(text)
            self._add(*parts)
        if text and (self._call is None or self._call.failed):  # nothing is expected after a call
            self._add(self._kind(text))

    def _end_body(self) -> None:
        if self._call is not None:
            self._add(*self._call.finish())
            self._call = None

    def _end(self) -> None:
        if not self._in_head:  # an incomplete head is not shown
            self._add_body(self._rest)
            self._end_body()
        self._rest = ""
