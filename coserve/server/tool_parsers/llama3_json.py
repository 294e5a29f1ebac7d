"""Parser for Llama 3.1 to 3.3.

An answer is `{"name": …, "parameters": {…}}`, or has that after `<|python_tag|>`; several calls
have `;` between them (https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/).
"""

import json
from collections.abc import Mapping
from typing import Any

from coserve.server.tool_parsers._json_call import JsonCall
from coserve.server.tool_parsers._marked import MarkedJsonCalls

_TAG = "<|python_tag|>"


class Llama3Json(MarkedJsonCalls):
    """Parser of JSON at the start, or after a tag."""

    markers = (_TAG,)
    separator = "; "
    _begin = _TAG

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._at_start = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return _TAG in template or '"parameters": dictionary of argument name' in template

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    def _step(self) -> bool:
        if self._at_start:
            text = self._rest.lstrip()
            if not text:
                return False
            self._at_start = False
            if text.startswith("{"):
                self._in_call, self._call, self._rest = True, JsonCall(self._names), text
        return super()._step()

    def _step_after_call(self) -> bool:
        text = self._rest.lstrip()
        if not text:
            return False
        after = text[1:].lstrip()
        # What follows the semicolon decides whether it separates calls.
        if text.startswith(";") and not after:
            return False
        if text.startswith(";") and after.startswith("{"):
            self._num_calls += 1
            self._call, self._rest = (
                JsonCall(self._names, self._rest[: len(self._rest) - len(after)]),
                after,
            )
        else:
            self._leave(failed=False)
        return True

    def _end_after_call(self) -> None:
        self._rest = self._rest.strip().removeprefix(";")
