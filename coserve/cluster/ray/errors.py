"""Ray's errors, in one line."""

import re

_MAX_CHARACTERS = 300
# Beginning of the line in which Python, or a command of Ray, reports an error.
_ERROR = re.compile(r"[\w.]*(Error|Exception): ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error; all lines where the first only introduces the others."""
    lines = _lines(str(error))
    if not lines:
        return type(error).__name__
    return _joined(lines) if lines[0].endswith(":") else lines[0]


def last_error(stderr: str) -> str | None:
    """Return the error with which a process has ended, from its stderr, or else the last line; None
    if there is none.
    """
    lines = _lines(stderr)
    errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    if errors:
        return _joined(lines[errors[-1] :]).partition(": ")[2].rstrip(".")
    return lines[-1] if lines else None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _joined(lines: list[str]) -> str:
    return " ".join(lines)[:_MAX_CHARACTERS]
