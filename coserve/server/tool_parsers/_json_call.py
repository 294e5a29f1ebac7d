"""Incremental reader of a call as one JSON object, or of its arguments alone."""

import json
from collections.abc import Collection

from coserve.server.tool_parsers.base import Arguments, CallBegins, CallFails, Content, Part

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id")
_SPACE = " \t\r\n"


class _Nesting:
    """Position within JSON text; `depth` is the number of open objects and lists."""

    def __init__(self) -> None:
        self.depth, self.in_string, self._escaped = 0, False, False

    def read(self, character: str) -> None:
        """Advance by one character."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.in_string = False
        elif character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class JsonArguments:
    """Reader of the arguments of a known function: one JSON object.

    `before` is the text of the call so far; `is_complete` becomes true at its end, or when it
    `failed`.
    """

    def __init__(self, name: str, before: str) -> None:
        self.is_complete, self.failed = False, False
        self._name, self._before, self._raw = name, before, ""
        self._nesting = _Nesting()
        self._begun = False

    def push(self, text: str) -> tuple[list[Part], str]:
        """Return the parts that further text adds, and the text after the call."""
        if not self._begun:
            blank = len(text) - len(text.lstrip(_SPACE))
            self._before, text = self._before + text[:blank], text[blank:]
            if not text:
                return [], ""
            if not text.startswith("{"):
                return self._fail(), text
        parts: list[Part] = [] if self._begun else [CallBegins(self._name)]
        self._begun = True
        for place, character in enumerate(text):
            self._nesting.read(character)
            if not self._nesting.depth:
                self._raw += text[: place + 1]
                self.is_complete = True
                parts.append(Arguments(text[: place + 1]))
                return parts + ([] if _is_object(self._raw) else self._fail()), text[place + 1 :]
        self._raw += text
        return [*parts, Arguments(text)], ""

    def finish(self) -> list[Part]:
        """Return the parts at the end of the text."""
        return [] if self.is_complete else self._fail()

    def _fail(self) -> list[Part]:
        self.is_complete = self.failed = True
        text = self._before + self._raw
        return [CallFails(text) if self._begun else Content(text)]


class JsonCall:
    """Reader of an object with a `name` and `arguments` (or `parameters`), in any order.

    Arguments may be missing. `names` are the functions that can be called, `before` is the text of
    the call so far; `is_complete` becomes true at its end, or when it `failed`.
    """

    def __init__(self, names: Collection[str], before: str = "") -> None:
        self.is_complete, self.failed = False, False
        self._names, self._before, self._raw = names, before, ""
        self._nesting = _Nesting()
        self._expects = "object"  # then a key, a colon, a value, a comma
        self._place = 0  # where the key or the value begins
        self._key = ""
        self._values: dict[str, str] = {}
        self._name: str | None = None
        self._sent: int | None = (
            None  # characters of the arguments that were passed on; None: the call has not begun
        )

    def push(self, text: str) -> tuple[list[Part], str]:
        """Return the parts that further text adds, and the text after the call."""
        start, self._raw = len(self._raw), self._raw + text
        for place in range(start, len(self._raw)):
            if not self._read(self._raw[place], place):
                return self._fail(place)
            if self.is_complete:
                rest, self._raw = self._raw[place + 1 :], self._raw[: place + 1]
                return self._close(), rest
        return self._arguments_so_far(), ""

    def finish(self) -> list[Part]:
        """Return the parts at the end of the text."""
        return [] if self.is_complete else self._fail(len(self._raw))[0]

    def _fail(self, place: int) -> tuple[list[Part], str]:
        """Mark the text as no call, from a position on."""
        self.is_complete = self.failed = True
        text, rest = self._before + self._raw[:place], self._raw[place:]
        if self._sent is not None:
            return [CallFails(text)], rest
        return ([Content(text)] if text else []), rest

    def _read(self, character: str, place: int) -> bool:
        """Read a character; return whether the text can still be a call."""
        nesting, was_in_string = self._nesting, self._nesting.in_string
        if not was_in_string and character in _SPACE:
            return True
        expects = self._expects
        if expects == "object":
            self._expects = "key"
            nesting.read(character)
            return character == "{"
        if expects == "value":
            return self._read_value(character, place)
        if expects == "colon" and not was_in_string:
            self._expects, self._place = "value", -1
            return character == ":"
        nesting.read(character)
        if expects == "key":
            self._expects, self._place = "colon", place
            if character == "}" and not self._values:
                return False  # an empty object names no function
            return character == '"'
        if not nesting.in_string:  # the key's end
            self._key = self._raw[self._place + 1 : place]
            # An unknown or repeated key: an object, but no call.
            return self._key in _KEYS and self._key not in self._values
        return True

    def _read_value(self, character: str, place: int) -> bool:
        nesting = self._nesting
        if self._place < 0:
            self._place = place
            if self._key in _ARGUMENTS and (
                character != "{" or any(key in self._values for key in _ARGUMENTS)
            ):
                return False
        # The comma or brace of the call's own object: the value has ended.
        elif nesting.depth == 1 and not nesting.in_string and character in ",}":
            value = self._values[self._key] = self._raw[self._place : place].strip(_SPACE)
            self._expects = "key"
            self.is_complete = character == "}"
            if self._key == "name":
                self._name = _string(value)
                return self._name in self._names
            return True
        nesting.read(character)
        return nesting.depth >= 1

    def _arguments_so_far(self) -> list[Part]:
        if (
            self._name is None
            or self._expects != "value"
            or self._key not in _ARGUMENTS
            or self._place < 0
        ):
            return []
        return self._send(
            # The value may be complete, and white space after it is not part of it.
            self._raw[self._place :].rstrip(_SPACE)
            if self._nesting.depth == 1
            else self._raw[self._place :]
        )

    def _send(self, arguments: str) -> list[Part]:
        """Return the arguments that were not passed on before."""
        assert self._name is not None
        begin: list[Part] = [CallBegins(self._name)] if self._sent is None else []
        more = arguments[self._sent or 0 :]
        self._sent = len(arguments)
        return begin + ([Arguments(more)] if more else [])

    def _close(self) -> list[Part]:
        # Until now only the nesting was followed; the whole text may still not be valid JSON.
        if self._name is None or not _is_object(self._raw):
            return self._fail(len(self._raw))[0]
        return self._send(
            next((self._values[key] for key in _ARGUMENTS if key in self._values), "{}")
        )


def _string(value: str) -> str | None:
    try:
        decoded = json.loads(value)
    except ValueError:
        return None
    return decoded if isinstance(decoded, str) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
