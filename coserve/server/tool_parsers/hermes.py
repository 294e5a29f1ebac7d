"""Hermes 2 and 3, Qwen 2.5 and 3, and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one for each call
(https://github.com/NousResearch/Hermes-Function-Calling).
"""

import json

from coserve.server.tool_parsers._json_call import JsonCall
from coserve.server.tool_parsers._marked import MarkedCalls
from coserve.server.tool_parsers.base import JsonCalls

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(MarkedCalls, JsonCalls):
    """JSON between tags."""

    markers = (_BEGIN, _END)
    separator = "\n"
    _begin = _BEGIN
    _call: JsonCall | None = None  # None after its end: only the closing tag is missing

    @classmethod
    def fits(cls, template: str) -> bool:
        return _BEGIN in template and "<function=" not in template

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        return f'{_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_END}"

    def _enter(self) -> None:
        self._call = JsonCall(self._names, _BEGIN)

    def _step_in_call(self) -> bool:
        if self._call is not None:
            parts, self._rest = self._call.push(self._rest)
            self._add(*parts)
            if not self._call.is_over:
                return False
            if self._call.failed:
                self._leave(failed=True)
                return True
            self._call = None
        self._rest = self._rest.lstrip()
        if _END.startswith(self._rest) and self._rest != _END:
            return False
        self._rest = self._rest.removeprefix(_END)
        self._leave(failed=False)
        return True

    def _end_call(self) -> None:
        if self._call is not None:
            self._add(*self._call.finish())
            self._leave(failed=self._call.failed)
        else:
            if _END.startswith(self._rest.strip()):
                self._rest = ""
            self._leave(failed=False)
