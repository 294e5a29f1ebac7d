"""Tables in files: CSV or TSV with a header row, or JSONL with an object on each line; plain or
gzipped.

Columns are found by any of the names that public data sets give them, whatever the case, spaces and
underscores: `ContextTokens`, `context_tokens` and `Context tokens` are one.
"""

import csv
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from coserve.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


def read_records(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the line number and the fields of each record: text from CSV, JSON values from JSONL,
    and from a JSON array of objects, whose records are counted instead.

    Raises:
        DataError: It cannot be read, is not text, or a line of it is not a record.
    """
    try:
        with _open(path) as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if first.lstrip().startswith("["):
                yield from _array(path, file)
            elif first.lstrip().startswith("{"):
                yield from _json_lines(path, file)
            else:
                yield from _csv_rows(path, file, has_tabs="\t" in first)
    except (OSError, UnicodeDecodeError, EOFError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def read_columns(
    path: str | Path,
    columns: Sequence[Sequence[str]],
    where: Mapping[str, str] | None = None,
    *,
    optional: Sequence[str] = (),
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the line number and the wanted columns of each record, as text ("" where there is
    none).

    Args:
        columns: For each column, the names that it may have.
        where: Values that these columns must have.
        optional: Columns after these, which may be missing.

    Raises:
        DataError: As `read_records`; or there is no such column (the message lists those that there
            are).
    """
    records = read_records(path)
    first = next(records, None)
    if first is None:
        return
    names = {_plain(name): name for name in first[1]}
    chosen: list[str | None] = [_choose(path, options, names) for options in columns]
    chosen += [names.get(_plain(name)) for name in optional]
    wanted = [(_choose(path, (name,), names), value) for name, value in (where or {}).items()]
    for number, record in chain([first], records):
        if all(_text(record.get(name)) == value for name, value in wanted):
            yield number, tuple("" if name is None else _text(record.get(name)) for name in chosen)


def _choose(path: str | Path, options: Sequence[str], names: Mapping[str, str]) -> str:
    for option in options:
        if _plain(option) in names:
            return names[_plain(option)]
    raise DataError(
        f"{path} has no column {' or '.join(options)}: it has {', '.join(names.values()) or 'none'}"
    )


def _open(path: str | Path) -> IO[str]:
    with open(path, "rb") as file:
        zipped = file.read(2) == _GZIP_MAGIC
    return (
        gzip.open(path, "rt", newline="", encoding="utf-8-sig")
        if zipped
        else open(path, newline="", encoding="utf-8-sig")
    )


def _csv_rows(
    path: str | Path, file: IO[str], *, has_tabs: bool
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a table.

    Args:
        has_tabs: Whether tabs separate the fields, which then have no quotes, but quotation marks
            in the text.
    """
    if has_tabs:
        reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.DictReader(file, skipinitialspace=True)
    for row in reader:
        if None in row:
            raise DataError(f"{path}, line {reader.line_num}: has more fields than the header row")
        yield reader.line_num, row


def _json_lines(path: str | Path, file: IO[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, _record(f"{path}, line {number}", line)


def _array(path: str | Path, file: IO[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        records = json.load(file)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error})") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, record {number}: must be a JSON object, not {type(record).__name__}"
            )
        yield number, record


def _record(where: str, line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: must be a JSON object, not {type(record).__name__}")
    return record


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()
