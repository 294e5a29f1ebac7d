"""Parser for Qwen 3 Coder and Qwen 3.5: XML of parameters, as in the model's chat template.

https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct has it:

    <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>

A value is literal text where the function's schema says string, and JSON otherwise.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from coserve.server.tool_parsers._marked import MarkedCalls
from coserve.server.tool_parsers.base import Arguments, CallBegins, CallFails, Content

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = r"([^>\n]{1,256})"


class Qwen3Coder(MarkedCalls):
    """Parser that passes a parameter's value on when it is complete."""

    markers = (_BEGIN, _END)
    _begin = _BEGIN
    _name = ""  # of the function, once it is known
    _read = ""  # of the call, so far
    _num_parameters = 0
    _is_closed = False  # only the closing tag is missing

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def _enter(self) -> None:
        self._name, self._read, self._num_parameters, self._is_closed = "", _BEGIN, 0, False

    def _step_in_call(self) -> bool:
        self._take_text(len(self._rest) - len(self._rest.lstrip()))
        if not self._rest:
            return False
        if self._is_closed:
            return self._close()
        if not self._name:
            return self._step_to_function()
        if self._rest.startswith(_FUNCTION_END):
            self._take_text(len(_FUNCTION_END))
            self._add(Arguments("}" if self._num_parameters else "{}"))
            self._is_closed = True
            return True
        if (match := re.match(f"{_PARAMETER}{_NAME}>", self._rest)) is not None:
            return self._step_over_parameter(match[1], match.end())
        return self._wait_or_fail(_PARAMETER, _FUNCTION_END)

    def _step_to_function(self) -> bool:
        match = re.match(f"{_FUNCTION}{_NAME}>", self._rest)
        if match is None:
            return self._wait_or_fail(_FUNCTION)
        if match[1] not in self._names:
            return self._fail()
        self._name = match[1]
        self._take_text(match.end())
        self._add(CallBegins(self._name))
        return True

    def _step_over_parameter(self, key: str, start: int) -> bool:
        end = self._rest.find(_PARAMETER_END, start)
        if end < 0:
            return False
        value = self._rest[start:end].removeprefix("\n").removesuffix("\n")
        begin = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._add(
            Arguments(
                f"{begin}{json.dumps(key, ensure_ascii=False)}: {_json(value, self._schema(key))}"
            )
        )
        self._take_text(end + len(_PARAMETER_END))
        return True

    def _close(self) -> bool:
        if _END.startswith(self._rest) and self._rest != _END:
            return False
        self._rest = self._rest.removeprefix(_END)
        self._leave(failed=False)
        return True

    def _end_call(self) -> None:
        if self._is_closed:
            if _END.startswith(self._rest.strip()):
                self._rest = ""
            self._leave(failed=False)
        else:
            self._fail()

    def _wait_or_fail(self, *expected: str) -> bool:
        """Wait for the next tag if it may still come; otherwise mark the text as no call."""
        could_come = any(tag.startswith(self._rest) for tag in expected)
        could_end = re.fullmatch(f"{expected[0]}{_NAME}", self._rest) is not None
        return False if could_come or could_end else self._fail()

    def _fail(self) -> bool:
        """Mark the text so far as no call; the rest is content, in which a call may follow."""
        self._add(CallFails(self._read) if self._name else Content(self._read))
        self._leave(failed=True)
        return True

    def _take_text(self, number: int) -> None:
        self._read, self._rest = self._read + self._rest[:number], self._rest[number:]

    def _schema(self, key: str) -> Mapping[str, Any]:
        properties = self._schemas[self._name].get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else {}


def _json(value: str, schema: Mapping[str, Any]) -> str:
    """Return a value as JSON; what is not JSON, or should be a string, becomes a string."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds and not (value == "null" and "null" in kinds):
        return json.dumps(value, ensure_ascii=False)
    if "boolean" in kinds and value.lower() in ("true", "false"):
        return value.lower()
    try:
        return json.dumps(json.loads(value, parse_constant=_no_json), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


def _no_json(name: str) -> Any:
    raise ValueError(name)
