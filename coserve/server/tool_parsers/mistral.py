"""Parser for Mistral (https://docs.mistral.ai).

A call is `[TOOL_CALLS]` and a JSON list of calls, or, since version 11 of its tokenizers, the
function's name with its arguments after `[ARGS]` or directly, and the marker again for each further
call.
"""

import json
import re
import secrets
import string

from coserve.server.tool_parsers._json_call import JsonArguments, JsonCall
from coserve.server.tool_parsers._marked import MarkedCalls
from coserve.server.tool_parsers.base import Content, JsonCalls

_BEGIN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
# Text before the arguments; it ends with them, or with the marker.
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_LONGEST_HEAD = 256


class Mistral(MarkedCalls, JsonCalls):
    """Parser of a list of calls, or of a name with its arguments."""

    markers = (_BEGIN, _ARGS, _ID)
    separator = ""
    _begin = _BEGIN
    _call: JsonCall | JsonArguments | None = None
    _in_list = False

    @classmethod
    def fits(cls, template: str) -> bool:
        return _BEGIN in template

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        return f'{_BEGIN}[{{"name": {json.dumps(name)}, "arguments": ', "}]"

    @classmethod
    def new_id(cls) -> str:
        """Return a new id of nine letters and digits, which is all that the templates accept."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _enter(self) -> None:
        self._call, self._in_list = None, False

    def _step_in_call(self) -> bool:
        if self._call is None and not self._step_to_call():
            # True if the list has ended or the marker was text: what follows is content.
            return self._in_call is False
        assert self._call is not None
        parts, self._rest = self._call.push(self._rest)
        self._add(*parts)
        if not self._call.is_complete:
            return False
        failed, self._call = self._call.failed, None
        if failed or not self._in_list:
            self._leave(failed=failed)
        else:
            self._num_calls += 1
        return True

    def _step_to_call(self) -> bool:
        """Read up to a call; return whether one begins. If none can, the marker was text."""
        text = self._rest.lstrip()
        if not text:
            return False
        if self._in_list:
            if text[0] == "]":
                self._rest = text[1:]
                self._leave(failed=False)
                return False
            text = text.removeprefix(",").lstrip()
            if not text:
                return False
            self._call, self._rest = (
                JsonCall(self._names, self._rest[: len(self._rest) - len(text)]),
                text,
            )
            return True
        if text[0] in "[{":
            self._in_list = text[0] == "["
            text = text.removeprefix("[")
            before = _BEGIN + self._rest[: len(self._rest) - len(text)]
            self._call, self._rest = JsonCall(self._names, before), text
            return True
        head = _HEAD.match(self._rest)
        if head is not None and head[1] in self._names:
            self._call, self._rest = (
                JsonArguments(head[1], _BEGIN + head[0]),
                self._rest[head.end() :],
            )
            return True
        if (
            # An unknown function, or too much text for a name: this cannot become a call.
            head is not None
            or "{" in self._rest
            or _BEGIN in self._rest
            or len(self._rest) > _LONGEST_HEAD
        ):
            self._add(Content(_BEGIN))
            self._leave(failed=True)
        return False

    def _end_call(self) -> None:
        failed = False
        if self._call is not None:
            self._add(*self._call.finish())
            failed = self._call.failed
        elif not self._in_list:
            self._add(Content(_BEGIN))
            failed = True
        self._leave(failed=failed)
