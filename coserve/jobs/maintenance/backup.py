"""Backup of a home, also while its server runs: records, files, and all that jobs need, as of one
moment.

At that moment nobody may write records, while every file that they name gets a hard link in a
directory of the backup's own, which takes milliseconds. Files never change under a name, and
whatever removes one has removed its record before: so all of them exist, and stay until they are in
the archive. The records are copied from a transaction that sees the same moment.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from coserve.devices.messages.jobs import OPTIMIZER_FILE
from coserve.engine.jobs.checkpoint import POSITION_FILE
from coserve.errors import CoserveError
from coserve.home import make_private
from coserve.jobs.files.shared_files import entries
from coserve.jobs.records import AdapterRecord, CheckpointRecord, FileRecord, JobRecord
from coserve.jobs.sql.schema import SCHEMA_VERSION, Row
from coserve.jobs.sql.store import DATABASE_FILE, Store
from coserve.jobs.sql.transaction import Transaction
from coserve.version import VERSION

FORMAT = 1
MANIFEST = "manifest.json"
# Folder of a home with links to the files of a backup that is being written.
STAGE = ".backup"


@dataclass(frozen=True, kw_only=True)
class Backup:
    """Summary of a backup."""

    file: str
    """Path of the archive."""
    num_bytes: int
    """Size of the archive."""
    num_files: int
    """Number of uploaded files."""
    num_jobs: int
    """Number of jobs."""
    num_checkpoints: int
    """Number of checkpoints."""
    missing: tuple[str, ...]
    """Paths below the home that are on record and do not exist."""


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Paths below the home that the records name."""

    paths: frozenset[Path]
    """Files."""
    whole: frozenset[Path]
    """Directories of checkpoints from which jobs resume, which are needed whole."""
    adapters: frozenset[Path]
    """Directories of which only the adapter is needed."""


def write_backup(home: Path, store: Store, file: Path) -> Backup:
    """Write an archive, whole or not at all.

    Raises:
        CoserveError: It cannot be written, exists already, or another backup is being written.
        StoreError: The database cannot be read now.
    """
    file = file.absolute()
    if file.exists():
        raise CoserveError(f"{file} exists already: choose another name")
    part = file.with_name(f"{file.name}.part")
    try:
        with _stage(home) as stage:
            names, missing, counts = _gather(home, store, stage)
            part.unlink(missing_ok=True)  # left by a process that was killed
            try:
                _write_archive(stage, names, missing, part)
                part.rename(file)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise CoserveError(
            f"the backup cannot be written: {error.strerror or error} ({error.filename or file})"
        ) from None
    return Backup(file=str(file), num_bytes=file.stat().st_size, missing=tuple(missing), **counts)


@contextmanager
def _stage(home: Path) -> Iterator[Path]:
    """Create a directory for this backup, after one that an earlier backup left was removed."""
    stage = home / STAGE
    with (home / f"{STAGE}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CoserveError(f"another backup of {home} is being written: wait for it") from None
        shutil.rmtree(stage, ignore_errors=True)
        make_private(stage)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _gather(home: Path, store: Store, stage: Path) -> tuple[list[str], list[str], dict[str, int]]:
    """Collect in `stage` the content of the archive.

    Returns:
        Its names, the names that are missing, and counts of records.
    """
    present: set[Path] = {Path(DATABASE_FILE)}
    missing: set[Path] = set()
    counts: dict[str, int] = {}

    def link(transaction: Transaction) -> None:
        files, jobs = transaction.all_of(FileRecord), transaction.all_of(JobRecord)
        checkpoints, adapters = (
            transaction.all_of(CheckpointRecord),
            transaction.all_of(AdapterRecord),
        )
        counts.update(num_files=len(files), num_jobs=len(jobs), num_checkpoints=len(checkpoints))
        _link_all(home, stage, _wanted(home, files, jobs, checkpoints, adapters), present, missing)

    snapshot = Store.at(stage)
    try:
        store.copy_to(snapshot, partial(_with_relative_paths, home), while_still=link)
    finally:
        snapshot.close()
    return sorted(map(str, present)), sorted(map(str, missing)), counts


def _relative(home: Path, directory: str | None) -> str | None:
    """Return a path below the home as a relative one, so that a new home can prepend its own."""
    path = Path(directory or "")
    # Records may name a home behind a symbolic link in either form.
    for form in (home, home.resolve()):
        if path.is_relative_to(form):
            return str(path.relative_to(form))
    return directory


def _with_relative_paths(home: Path, row: Row) -> Row:
    if "directory" in row:
        row["directory"] = _relative(home, row["directory"])
    if row.get("start") is not None:
        row["start"] = {**row["start"], "directory": _relative(home, row["start"]["directory"])}
    return row


def _wanted(
    home: Path,
    files: Sequence[FileRecord],
    jobs: Sequence[JobRecord],
    checkpoints: Sequence[CheckpointRecord],
    adapters: Sequence[AdapterRecord],
) -> _Wanted:
    paths, whole = {Path("files", record.id) for record in files}, set()
    newest = {record.job: record for record in sorted(checkpoints, key=lambda each: each.step)}
    for job in jobs:
        if job.is_terminal:
            continue
        if job.id in newest:
            whole.add(Path(_relative(home, newest[job.id].directory) or ""))
        if job.validated:
            paths.add(Path("jobs", job.id, "examples.msgpack"))
            if job.validation_file is not None:
                paths.add(Path("jobs", job.id, "validation.msgpack"))
    directories = [each.directory for each in checkpoints] + [
        each.directory for each in adapters if each.directory
    ]
    relative = {Path(_relative(home, each) or "") for each in directories}
    # Directories elsewhere do not belong to this home.
    inside = {path for path in relative if not path.is_absolute()}
    return _Wanted(
        paths=frozenset(paths), whole=frozenset(whole), adapters=frozenset(inside - whole)
    )


def _link_all(
    home: Path, stage: Path, wanted: _Wanted, present: set[Path], missing: set[Path]
) -> None:
    for path in wanted.paths:
        (present if _link(home / path, stage / path) else missing).add(path)
    for directory in wanted.whole | wanted.adapters:
        only_for_its_job = {directory / POSITION_FILE, directory / OPTIMIZER_FILE}
        names = {directory / path.name for path in entries(home / directory)}
        if not names:
            missing.add(directory)
            continue
        # A checkpoint from which no job resumes is saved as an adapter, without optimizer state.
        names = names | only_for_its_job if directory in wanted.whole else names - only_for_its_job
        for path in names:
            (present if _link(home / path, stage / path) else missing).add(path)


def _link(source: Path, target: Path) -> bool:
    """Give a file a hard link, or copy it where that is impossible; return whether it existed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            os.link(source, target, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:  # hard links are not possible here
            shutil.copyfile(source, target)
    except FileNotFoundError:
        return False
    return True


def _write_archive(stage: Path, names: list[str], missing: list[str], file: Path) -> None:
    """Write the files and then the manifest, since all checksums are known by then."""
    contents: dict[str, dict[str, Any]] = {}
    # Private from its first byte: the archive holds every tenant's data.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with (
        os.fdopen(descriptor, "wb") as out,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            with (stage / name).open("rb") as source:
                hashing = _Hashing(source)
                member = _member(name, os.fstat(source.fileno()).st_size)
                archive.addfile(member, hashing)  # type: ignore[arg-type]
            contents[name] = {"bytes": member.size, "sha256": hashing.sum.hexdigest()}
        manifest = {
            "format": FORMAT,
            "coserve": VERSION,
            "schema": SCHEMA_VERSION,
            "created_at": int(time.time()),
        }
        text = json.dumps({**manifest, "missing": missing, "contents": contents}, indent=1).encode()
        archive.addfile(_member(MANIFEST, len(text)), io.BytesIO(text))
        # Write the end of the archive now, so that fsync covers it.
        archive.close()
        out.flush()
        os.fsync(out.fileno())


def _member(name: str, num_bytes: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = num_bytes, 0o600, int(time.time())
    return member


class _Hashing:
    """A file whose checksum is computed as it is read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self.sum = source, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.sum.update(data)
        return data


def to_data(backup: Backup) -> dict[str, Any]:
    """Return a backup's summary as plain data."""
    return asdict(backup)
