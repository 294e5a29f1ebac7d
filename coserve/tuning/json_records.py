"""JSON files as records: one record a line (JSON Lines), or one array of records.

Blank lines are passed over, and so are a byte order mark and the line ends of Windows. Anything
else that is not JSON is refused, by an error that names the cause where it is a usual one: a
comment, a comma after a record, a record over several lines.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from coserve.errors import DataError

Record = dict[str, Any]

_BYTE_ORDER_MARK = "\ufeff"
_COMMENTS = ("#", "//", "/*")


def records_of(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the place of each record and its text; or the record itself, if the file is one JSON
    array.

    Raises:
        DataError: The array is damaged.
    """
    numbered = (
        (number, line) for number, line in enumerate(_without_mark(lines), 1) if line.strip()
    )
    is_first = True
    for number, line in numbered:
        if is_first and line.lstrip().startswith("["):
            text = "".join([line, *(rest for _, rest in numbered)])
            for place, record in enumerate(_array(text), 1):
                yield f"record {place}", record
            return
        is_first = False
        yield f"line {number}", line


def parsed_record(given: Any) -> Record:
    """Return a line's text, or the record of an array, as an object; DataError for anything else,
    or the one that it is.
    """
    if isinstance(given, DataError):
        raise given
    record = parsed_json(given) if isinstance(given, str) else given
    if not isinstance(record, dict):
        raise DataError(f"must be a JSON object, not {type(record).__name__}")
    return record


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text; DataError says what is wrong with it."""
    try:
        return json.loads(text.removeprefix(_BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({_cause(text.strip()) or error})") from None


def _without_mark(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield line.removeprefix(_BYTE_ORDER_MARK) if number == 0 else line


def _array(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        cause = "a comma after the last record" if text.rstrip("] \t\r\n").endswith(",") else error
        raise DataError(f"the array of records is not valid JSON ({cause})") from None


def _cause(text: str) -> str | None:
    """Return why a line is not JSON, if that is a usual mistake."""
    if text.startswith(_COMMENTS):
        return "a comment; JSON has none"
    if text in ("{", "[") or (text.startswith("{") and text.endswith(("{", "["))):
        return "a record over several lines; write each on one line, or all in one array"
    if text.endswith(",") and _is_json(text[:-1]):
        return "a comma after the record; write one record a line without it, or all in one array"
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
