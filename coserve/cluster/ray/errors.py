"""What Ray's errors say, in one line."""

import re

_MOST_CHARACTERS = 300
# How Python, and Ray's commands, begin the last words of a process.
_ERROR = re.compile(r"[\w.]*(Error|Exception): ")


def first_line(error: BaseException) -> str:
    """The first line; all of them where that one says only what follows."""
    lines = _lines(str(error))
    if not lines:
        return type(error).__name__
    return _joined(lines) if lines[0].endswith(":") else lines[0]


def last_words(stderr: str) -> str | None:
    """Of a process that has ended, the error that it ended with, or else the last line; None: it
    has said nothing.
    """
    lines = _lines(stderr)
    errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    if errors:
        return _joined(lines[errors[-1] :]).partition(": ")[2].rstrip(".")
    return lines[-1] if lines else None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _joined(lines: list[str]) -> str:
    return " ".join(lines)[:_MOST_CHARACTERS]
