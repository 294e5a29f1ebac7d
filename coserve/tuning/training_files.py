"""Training files as records: JSONL, one JSON array, CSV with a header, Parquet.

CSV is known by its name (`.csv`), Parquet by its first bytes; everything else is JSON.
"""

import csv
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from coserve.errors import DataError
from coserve.tuning.json_records import records_of
from coserve.tuning.line_formats import with_json_cells

# A record is tokenized in one piece, at a hundred times its memory: a quarter of a million tokens
# of English.
_MAX_RECORD_BYTES = 1 << 20
_PARQUET_MAGIC = b"PAR1"
# Byte order marks of a text that is not UTF-8, as Windows' editors write it.
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Rows of a Parquet file that are in memory at once, and what they may be packed with: a small file
# may hold terabytes.
_ROWS_AT_ONCE, _MAX_GROUP_BYTES = 64, 1 << 30


class TrainingFile:
    """The records of a file, one after the other. `num_bytes_read` estimates the bytes of the
    records so far.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        """Open nothing yet.

        Args:
            name: Name that the file's owner gave it; by default, that of the path.
        """
        self.path, self.num_bytes_read = path, 0
        self._is_csv = (name or path.name).lower().endswith(".csv")

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield the place of each record with its text, the record itself, or the DataError that
        says what is wrong with it.

        Raises:
            DataError: Nothing more can be read.
            OSError: The disk fails.
        """
        with self.path.open("rb") as file:
            begin = file.read(len(_PARQUET_MAGIC))
        if begin == _PARQUET_MAGIC:
            yield from self._parquet()
        else:
            yield from self._csv() if self._is_csv else records_of(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of a text file.

        Raises:
            DataError: The file is not UTF-8, or a line is too long to be an example; the message
                names it.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(
                iter(lambda: file.readline(_MAX_RECORD_BYTES + 1), b""), 1
            ):
                if len(line) > _MAX_RECORD_BYTES:
                    raise DataError(f"line {number}: is longer than {_MAX_RECORD_BYTES} bytes")
                if number == 1 and line.startswith(_UTF_16):
                    raise DataError("is UTF-16; save it as UTF-8")
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"line {number}: is not UTF-8 at byte {error.start}") from None
                self.num_bytes_read += len(line)
                yield text

    def _csv(self) -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(
            _MAX_RECORD_BYTES
        )  # of the whole process; its own default is an eighth
        rows = csv.reader((line.removeprefix("\ufeff") for line in self._lines()), strict=True)
        header = list[str]()
        try:
            for number, cells in _numbered(rows):
                if not header:
                    header = [cell.strip() for cell in cells]
                    _check_header(header)
                elif len(cells) != len(header):
                    wrong = DataError(
                        f"has {len(cells)} cells; the header has {len(header)}: a comma without "
                        f"quotes?"
                    )
                    yield f"line {number}", wrong
                else:
                    yield f"line {number}", _checked(dict(zip(header, cells, strict=True)))
        except csv.Error as error:
            raise DataError(f"line {rows.line_num}: is not valid CSV ({error})") from None

    def _parquet(self) -> Iterator[tuple[str, Any]]:
        try:
            import pyarrow
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(
                "is a Parquet file, which is read with pyarrow, and that is not installed here: "
                "pip install 'coserve[parquet]'; or write the file as JSONL"
            ) from None
        num_bytes = self.path.stat().st_size
        try:
            with ParquetFile(self.path) as file:
                _check_groups(file.metadata)
                number = 0
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                    for row in batch.to_pylist():
                        number += 1
                        self.num_bytes_read = num_bytes * number // file.metadata.num_rows
                        yield f"row {number}", _checked(_without_nulls(row))
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"is a Parquet file that cannot be read: {' '.join(str(error).split())}"
            ) from None


def _numbered(rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which each row begins, and its cells; blank lines are skipped."""
    while True:
        number = rows.line_num + 1
        cells = next(rows, None)
        if cells is None:
            return
        if cells:
            yield number, cells


def _check_header(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"line 1: the header has {name!r} more than once")


def _check_groups(metadata: Any) -> None:
    for group in range(metadata.num_row_groups):
        num_bytes = metadata.row_group(group).total_byte_size
        if num_bytes > _MAX_GROUP_BYTES:
            raise DataError(
                f"row group {group + 1} of the Parquet file has {num_bytes} bytes; at most "
                f"{_MAX_GROUP_BYTES} are "
                "read: write it with smaller row groups"
            )


def _checked(record: Mapping[str, Any]) -> Any:
    """Return a record with values that are written as JSON, or the error that says what is wrong
    with it.
    """
    if _num_characters(record) > _MAX_RECORD_BYTES:
        return DataError(f"is longer than {_MAX_RECORD_BYTES} characters")
    try:
        return with_json_cells(record)
    except DataError as error:
        return error


def _num_characters(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_num_characters, chain(value, value.values())))
    if isinstance(value, list):
        return sum(map(_num_characters, value))
    return len(value) if isinstance(value, str) else 1


def _without_nulls(value: Any) -> Any:
    """Return a value without fields that a table has and the record has not: in a column of
    objects, each has the fields of all.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
