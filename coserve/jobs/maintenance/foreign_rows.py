"""Checks of a database that comes in a backup, which may be anyone's.

A server makes paths of what its records name, and removes what it finds there: so every name must
be a plain one, and every directory that a job has made must lie in the home.
"""

import sqlite3
from pathlib import Path, PurePosixPath
from typing import Any

from coserve.jobs.sql.copying import Row

# Columns whose values become parts of paths.
_NAMES = (
    *("id", "job", "training_file", "validation_file", "result_file"),
    *("file", "input_file", "output_file", "error_file"),
)
_JOBS = "jobs"


class ForeignRowError(Exception):
    """A record, or the database itself, is not one that coserve has written."""


def check_foreign_database(path: Path) -> None:
    """Raise ForeignRowError unless a file is a SQLite database of tables and indexes alone.

    Views, triggers and virtual tables would run SQL of their author, as soon as their table is read
    or written.
    """
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            found = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ForeignRowError(f"its database cannot be read: {error}") from None
    for kind, name, sql in found:
        if kind not in ("table", "index") or "VIRTUAL" in str(sql).upper().split()[:2]:
            raise ForeignRowError(f"its database has {name!r}, which is no plain table")


def check_foreign_row(row: Row) -> None:
    """Raise ForeignRowError for a record that leads out of the home."""
    if "item" not in row:  # of a conversation: its ids are clients', and name no file
        for column in _NAMES:
            if (value := row.get(column)) is not None and not _is_plain(value):
                raise ForeignRowError(f"a record has {value!r} as its {column}, which is no name")
    is_made_here = "step" in row or bool(row.get("job"))  # a checkpoint, or the adapter of a job
    if row.get("directory") is not None:
        _check_directory(row["directory"], is_made_here=is_made_here)
    if row.get("start") is not None:
        start = row["start"]
        if not isinstance(start, dict) or "directory" not in start:
            raise ForeignRowError(f"a job starts from {start!r}, which is no adapter")
        if start["directory"] is not None:
            _check_directory(start["directory"], is_made_here=False)


def _is_plain(value: Any) -> bool:
    """Return whether a value is one part of a path, or empty."""
    return (
        isinstance(value, str)
        and "\0" not in value
        and (not value or (value == Path(value).name != ".."))
    )


def _check_directory(value: Any, *, is_made_here: bool) -> None:
    """Raise ForeignRowError unless a directory lies below the jobs of the home. One that clients
    have loaded may be elsewhere: it is only read, and below --allow-adapter-paths alone.
    """
    path = PurePosixPath(value) if isinstance(value, str) and "\0" not in value else None
    if path is not None:
        if path.is_absolute() and not is_made_here:
            return
        if path.parts[:1] == (_JOBS,) and ".." not in path.parts and len(path.parts) > 2:
            return
    raise ForeignRowError(
        f"a record has the directory {value!r}, which is not below {_JOBS}/ in the home"
    )
