"""Restoration of a home from a backup, which is checked whole before any of it lies where a server
would read it.

A backup may be anyone's. A server derives paths from what its records name, and removes what it
finds there: so every name must be a plain one, and every directory that a job has made must lie in
the home.
"""

import hashlib
import shutil
import sqlite3
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from coserve.errors import CoserveError, StoreError
from coserve.home import make_private
from coserve.jobs.maintenance.backup import FORMAT, MANIFEST
from coserve.jobs.sql.schema import SCHEMA_VERSION, Row
from coserve.jobs.sql.store import DATABASE_FILE, Store

_STAGE = "restoring"
# Columns whose values become parts of paths.
_NAMES = (
    *("id", "job", "training_file", "validation_file", "result_file"),
    *("file", "input_file", "output_file", "error_file"),
)
_JOBS = "jobs"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Summary of a restored home."""

    home: str
    """Path of the home."""
    num_files: int
    """Number of uploaded files."""
    num_jobs: int
    """Number of jobs."""
    missing: tuple[str, ...]
    """Paths below the home that are on record, and did not exist when the backup was made."""


class _ArchivedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest entry of a file in the archive."""

    sha256: str
    """SHA-256 of the file, as hexadecimal digits."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The last file of an archive; see `coserve.jobs.maintenance.backup`."""

    format: int
    """Version of the archive's format."""
    schema: int
    """Version of the database's schema."""
    coserve: str
    """Version of the coserve that wrote the archive."""
    missing: list[str]
    """Paths that were on record and did not exist."""
    contents: dict[str, _ArchivedFile]
    """Files in the archive, by name."""


def restore_backup(file: Path, home: Path, url: str | None = None) -> Restored:
    """Create a home from an archive.

    The home is locked and empty; paths of adapters in the archived home become paths in the new
    one.

    Args:
        file: Archive to restore.
        home: Directory of the new home.
        url: URL of an empty database for the records (default: SQLite in the home).

    Raises:
        CoserveError: The archive is not one of coserve's, is damaged or of a newer version, or the
            home cannot be written.
        StoreError: The database cannot be written, or is not empty.
    """
    stage = home / _STAGE
    make_private(stage)
    try:
        manifest = _extract(file, stage)
        _check_foreign_database(stage / DATABASE_FILE)
        store = Store.at(home, url)
        try:
            _copy_records(stage, home, store)
            # Moved into place only after every record has passed its checks.
            for name in ("files", "jobs"):
                if (stage / name).is_dir():
                    (stage / name).rename(home / name)
            with store.read() as transaction:
                num_files, num_jobs = len(transaction.file_ids()), len(transaction.job_ids())
        finally:
            store.close()
    except (OSError, tarfile.TarError, EOFError, _ForeignRowError) as error:
        reason: object = error
        if isinstance(error, tarfile.ReadError) and "unexpected end" not in str(error):
            reason = "it is not a tar archive"
        raise CoserveError(f"{file} cannot be restored: {reason}") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Restored(
        home=str(home), num_files=num_files, num_jobs=num_jobs, missing=tuple(manifest.missing)
    )


def _extract(file: Path, stage: Path) -> _Manifest:
    """Extract exactly the files of the manifest, with their checksums verified.

    An archive is neither compressed nor sparse, so that its content is no larger than itself.
    """
    with tarfile.open(file, "r:") as archive:
        members = archive.getmembers()
        manifest = _manifest(file, archive)
        contents = manifest.contents
        names = [member.name for member in members]
        are_plain = all(member.isreg() and not member.issparse() for member in members)
        # Lists rather than sets: a name that occurs twice is damage as well.
        if sorted(names) != sorted([*contents, MANIFEST]) or not are_plain:
            raise CoserveError(f"{file} is damaged: its files are not those of its {MANIFEST}")
        archive.extractall(stage, filter="data")
    for name, known in contents.items():
        with (stage / name).open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != known.sha256:
                raise CoserveError(f"{file} is damaged: {name} is not what was saved")
    if DATABASE_FILE not in contents:
        raise CoserveError(f"{file} is damaged: it has no {DATABASE_FILE}")
    return manifest


def _manifest(file: Path, archive: tarfile.TarFile) -> _Manifest:
    try:
        content = archive.extractfile(MANIFEST)
    except KeyError:
        content = None
    if content is None:
        raise CoserveError(
            f"{file} is not a backup of coserve's, or was cut short: it has no {MANIFEST}"
        )
    try:
        manifest = msgspec.json.decode(content.read(), type=_Manifest)
    except (ValueError, RecursionError):
        raise CoserveError(f"{file} is damaged: its {MANIFEST} cannot be decoded") from None
    if manifest.format > FORMAT or manifest.schema > SCHEMA_VERSION:
        raise CoserveError(
            f"a newer coserve ({manifest.coserve}) has written {file}: update coserve"
        )
    return manifest


def _copy_records(stage: Path, home: Path, store: Store) -> None:
    with store.read() as transaction:
        if transaction.file_ids() or transaction.job_ids():
            raise StoreError("the database is not empty: restore into an empty one")
    saved = Store.at(stage)
    try:
        saved.copy_to(store, partial(_restored_row, home))
    finally:
        saved.close()


def _restored_row(home: Path, row: Row) -> Row:
    """Return a row whose relative paths are replaced by paths in the new home."""
    _check_foreign_row(row)

    def absolute(directory: str | None) -> str | None:
        return None if directory is None else str(home / directory)  # absolute ones stay

    if "directory" in row:
        row["directory"] = absolute(row["directory"])
    if row.get("start") is not None:
        row["start"] = {**row["start"], "directory": absolute(row["start"]["directory"])}
    return row


# -- checks of records that anyone may have written ------------------------------------------------


class _ForeignRowError(Exception):
    """A record, or the database itself, is not one that coserve has written."""


def _check_foreign_database(path: Path) -> None:
    """Raise _ForeignRowError unless a file is a SQLite database of tables and indexes alone.

    Views, triggers and virtual tables would run SQL of their author, as soon as their table is read
    or written.
    """
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            schema = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _ForeignRowError(f"its database cannot be read: {error}") from None
    for kind, name, sql in schema:
        # A virtual table has the kind "table" as well; only its SQL differs.
        if kind not in ("table", "index") or "VIRTUAL" in str(sql).upper().split()[:2]:
            raise _ForeignRowError(f"its database has {name!r}, which is not a plain table")


def _check_foreign_row(row: Row) -> None:
    """Raise _ForeignRowError for a record that points outside of the home."""
    if "item" not in row:  # items of conversations have clients' ids, which name no file
        for column in _NAMES:
            if (value := row.get(column)) is not None and not _is_plain(value):
                raise _ForeignRowError(
                    f"a record has {value!r} as its {column}, which is not a name"
                )
    is_made_here = "step" in row or bool(row.get("job"))  # a checkpoint, or the adapter of a job
    if row.get("directory") is not None:
        _check_directory(row["directory"], is_made_here=is_made_here)
    if row.get("start") is not None:
        start = row["start"]
        if not isinstance(start, dict) or "directory" not in start:
            raise _ForeignRowError(f"a job starts from {start!r}, which is not an adapter")
        if start["directory"] is not None:
            _check_directory(start["directory"], is_made_here=False)


def _is_plain(value: Any) -> bool:
    """Return whether a value is one part of a path, or empty."""
    return (
        isinstance(value, str)
        and "\0" not in value
        # Path.name is ".." for ".." and empty for "."
        and (not value or (value == Path(value).name != ".."))
    )


def _check_directory(value: Any, *, is_made_here: bool) -> None:
    """Raise _ForeignRowError unless a directory lies below the jobs of the home.

    One that clients have loaded may lie elsewhere: it is only read, and only below
    --allow-adapter-paths.
    """
    path = PurePosixPath(value) if isinstance(value, str) and "\0" not in value else None
    if path is not None:
        if path.is_absolute() and not is_made_here:
            return
        if path.parts[:1] == (_JOBS,) and ".." not in path.parts and len(path.parts) > 2:
            return
    raise _ForeignRowError(
        f"a record has the directory {value!r}, which is not below {_JOBS}/ in the home"
    )
