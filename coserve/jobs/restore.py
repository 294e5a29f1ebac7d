"""A home from a backup: checked whole before anything of it is where a server would read it."""

import hashlib
import json
import shutil
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coserve.errors import CoserveError, StoreError
from coserve.home import make_private
from coserve.jobs.backup import FORMAT, MANIFEST
from coserve.jobs.copying import Row
from coserve.jobs.schema import SCHEMA_VERSION
from coserve.jobs.store import DATABASE_FILE, Store

_STAGE = "restoring"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What is there now. missing: paths below the home that are on record, and were not there when it was backed up."""

    home: str
    num_files: int
    num_jobs: int
    missing: tuple[str, ...]


def restore_backup(file: Path, home: Path, url: str | None = None) -> Restored:
    """Make a home of an archive. url: of an empty database for its records; SQLite in the home by default.

    The home is locked, and has nothing in it; paths of adapters in the home are those of the new one.

    Raises:
        CoserveError: the archive is none of coserve's, damaged or of a newer version, or the home cannot be written.
            StoreError: the database cannot be written, or is not empty.
    """
    stage = home / _STAGE
    make_private(stage)
    try:
        manifest = _extract(file, stage)
        store = Store.at(home, url)
        try:
            _copy_records(stage, home, store)
            for name in ("files", "jobs"):
                if (stage / name).is_dir():
                    (stage / name).rename(home / name)
            with store.read() as transaction:
                num_files, num_jobs = len(transaction.file_ids()), len(transaction.job_ids())
        finally:
            store.close()
    except (OSError, tarfile.TarError, EOFError) as error:
        reason = "it is no tar archive" if isinstance(error, tarfile.ReadError) and "\n" in str(error) else error
        raise CoserveError(f"{file} cannot be restored: {reason}") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Restored(home=str(home), num_files=num_files, num_jobs=num_jobs, missing=tuple(manifest["missing"]))


def _extract(file: Path, stage: Path) -> dict[str, Any]:
    """All that the manifest has, and nothing else; each as it was."""
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        manifest = _manifest(file, archive)
        contents = manifest["contents"]
        names = [member.name for member in members]
        if sorted(names) != sorted([*contents, MANIFEST]) or not all(member.isreg() for member in members):
            raise CoserveError(f"{file} is damaged: it does not hold what its {MANIFEST} says")
        archive.extractall(stage, filter="data")
    for name, known in contents.items():
        with (stage / name).open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != known["sha256"]:
                raise CoserveError(f"{file} is damaged: {name} is not what was saved")
    if DATABASE_FILE not in contents:
        raise CoserveError(f"{file} is damaged: it has no {DATABASE_FILE}")
    return manifest


def _manifest(file: Path, archive: tarfile.TarFile) -> dict[str, Any]:
    try:
        content = archive.extractfile(MANIFEST)
    except KeyError:
        content = None
    if content is None:
        raise CoserveError(f"{file} is no backup of coserve's, or was cut short: it has no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.load(content)
        is_newer = manifest["format"] > FORMAT or manifest["schema"] > SCHEMA_VERSION
        {name: known["sha256"] for name, known in manifest["contents"].items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise CoserveError(f"{file} is damaged: its {MANIFEST} is none") from None
    if is_newer:
        raise CoserveError(f"a newer coserve ({manifest.get('coserve')}) has written {file}: update coserve")
    return manifest


def _copy_records(stage: Path, home: Path, store: Store) -> None:
    with store.read() as transaction:
        if transaction.file_ids() or transaction.job_ids():
            raise StoreError("the database is not empty: restore into an empty one")
    saved = Store.at(stage)
    try:
        saved.copy_to(store, partial(_with_absolute_paths, home))
    finally:
        saved.close()


def _with_absolute_paths(home: Path, row: Row) -> Row:
    def absolute(directory: str | None) -> str | None:
        return None if directory is None else str(home / directory)  # as it is, if it is elsewhere

    if "directory" in row:
        row["directory"] = absolute(row["directory"])
    if row.get("start") is not None:
        row["start"] = {**row["start"], "directory": absolute(row["start"]["directory"])}
    return row
