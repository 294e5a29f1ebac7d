"""Parser for Hermes 2 and 3, Qwen 2.5 and 3, and others.

Each call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
(https://github.com/NousResearch/Hermes-Function-Calling).
"""

import json

from coserve.server.tool_parsers._marked import MarkedJsonCalls

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(MarkedJsonCalls):
    """Parser of JSON between tags."""

    markers = (_BEGIN, _END)
    separator = "\n"
    _begin = _BEGIN

    @classmethod
    def fits(cls, template: str) -> bool:
        return _BEGIN in template and "<function=" not in template

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        return f'{_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_END}"

    def _step_after_call(self) -> bool:
        self._rest = self._rest.lstrip()
        if _END.startswith(self._rest) and self._rest != _END:
            return False
        self._rest = self._rest.removeprefix(_END)
        self._leave(failed=False)
        return True

    def _end_after_call(self) -> None:
        if _END.startswith(self._rest.strip()):
            self._rest = ""
