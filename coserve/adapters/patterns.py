"""Regular expressions that users bring, matched as PEFT matches them, in time linear in the text
whatever they are.

PEFT uses Python's `re`, which backtracks: `([a-z_.0-9]+)+X` runs for ever on a module's name. Here
RE2 matches, which never does (https://github.com/google/re2/wiki/WhyRE2). What RE2 does not have
(backreferences, look-around), and the little that it reads otherwise than Python, is refused.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import re2

from coserve.settings import shown

# Characters of one pattern, and of one that says where in a name a number is, which takes RE2's
# slower way.
LONGEST_PATTERN, LONGEST_CAPTURING_PATTERN = 4096, 256
# Limits of one setting.
_MAX_ENTRIES, _MAX_CHARACTERS = 4096, 1 << 15
# Memory of one compiled pattern; patterns whose repetitions need more are refused.
_MAX_BYTES = 1 << 18
_Value = TypeVar("_Value")
# Syntax that RE2 and Python both accept with different meanings. A backslash and what follows it
# are one piece.
_AMBIGUOUS = re.compile(
    r"(?P<backreference>\\[1-9])|\\.|(?P<shorthand>\{,)|(?P<nested>\[\[|\[:)", re.DOTALL
)
_LACKS = "patterns are matched by RE2, which has no backreferences, look-around, or atomic groups"


def compile_pattern(
    setting: str, pattern: str, *, within: str = "{}", captures: bool = False
) -> Any:
    """Compile a pattern of RE2, which has Python's methods.

    Args:
        setting: the setting that has the pattern, for the message.
        within: the expression of which it is a part, with {} in its place.
        captures: whether its groups are read, not only whether it matches.

    Raises:
        ValueError: it is not a regular expression of Python's, or not one of RE2's, or too long.
    """
    longest = LONGEST_CAPTURING_PATTERN if captures else LONGEST_PATTERN
    if len(pattern) > longest:
        raise ValueError(
            f"{setting} has a pattern of {len(pattern)} characters; {longest} are allowed"
        )
    if not pattern.isascii():
        raise ValueError(
            f"{setting} {shown(pattern)} must be of ASCII characters, as the names of modules are"
        )
    whole = within.replace("{}", pattern)
    try:
        re.compile(pattern)
        re.compile(whole)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{setting} {shown(pattern)} is no regular expression: {_reason(error)}"
        ) from None
    found = next(
        (match.lastgroup for match in _AMBIGUOUS.finditer(pattern) if match.lastgroup), None
    )
    if found is not None:
        wrong = {
            "backreference": "a backreference",
            "shorthand": "{,n} (write {0,n})",
            "nested": "[[ or [: (write [\\[)",
        }
        raise ValueError(
            f"{setting} {shown(pattern)} is not supported: it has {wrong[found]}; {_LACKS}"
        )
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = _MAX_BYTES, False, not captures
    try:
        return re2.compile(whole, options)
    except re2.error as error:
        raise ValueError(
            f"{setting} {shown(pattern)} is not supported: {_reason(error)}; {_LACKS}"
        ) from None


def check_sizes(setting: str, texts: Iterable[str]) -> None:
    """Raise ValueError if there are more names or patterns, or more characters in them, than a
    setting may have.
    """
    lengths = [len(text) for text in texts]
    if len(lengths) > _MAX_ENTRIES:
        raise ValueError(f"{setting} has {len(lengths)} entries; {_MAX_ENTRIES} are allowed")
    if sum(lengths) > _MAX_CHARACTERS:
        raise ValueError(f"{setting} has {sum(lengths)} characters; {_MAX_CHARACTERS} are allowed")


class ByPattern(Generic[_Value]):
    """Values by patterns of the ends of modules' names: PEFT's rank_pattern and alpha_pattern."""

    def __init__(self, setting: str, values: Mapping[str, _Value], default: _Value) -> None:
        """Compile the patterns; raise ValueError as `compile_pattern` does, and for too many."""
        check_sizes(setting, values)
        self._patterns = [
            (compile_pattern(setting, pattern, within=r"(.*\.)?({})$"), value)
            for pattern, value in values.items()
        ]
        self._default = default
        self._known: dict[str, _Value] = {}

    def at(self, module: str) -> _Value:
        """Return the value of the first pattern that matches."""
        if module not in self._known:
            matching = (value for pattern, value in self._patterns if pattern.match(module))
            self._known[module] = next(matching, self._default)
        return self._known[module]


def _reason(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return (
        said.decode(errors="replace")
        if isinstance(said, bytes)
        else str(said) or type(error).__name__
    )
