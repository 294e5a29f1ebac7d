"""Checks of a home: each reports what is wrong, changes nothing, and says what would mend it.

What can be mended without loss is mended on request: paths that no record names are moved to
`lost+found` in the home, never deleted. What is on record and not on disk stays: only its owner
knows whether a backup has it.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coserve.adapters.file_names import CONFIG_FILE, FULL_FILE, WEIGHTS_FILE
from coserve.devices.messages.jobs import OPTIMIZER_FILE
from coserve.engine.jobs.checkpoint import POSITION_FILE
from coserve.errors import ModelError, StoreError
from coserve.home import closed_mode
from coserve.jobs.files.folders import Folders
from coserve.jobs.files.shared_files import entries
from coserve.jobs.lifecycle.state import TRANSITIONS
from coserve.jobs.maintenance.backup import STAGE
from coserve.jobs.maintenance.offline import job_writer_at
from coserve.jobs.records import AdapterRecord, CheckpointRecord, FileRecord, JobRecord
from coserve.jobs.sql.batch_queries import BATCHES_FOLDER
from coserve.jobs.sql.store import Store
from coserve.models.files import weight_files

LOST_AND_FOUND = "lost+found"
_MODEL_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault of a home."""

    about: str
    """What the fault concerns."""
    problem: str
    """What is wrong."""
    remedy: str
    """What `mend` does, or without it, what the owner can do."""
    mend: Callable[[], object] | None = field(default=None, compare=False)
    """Mends the fault; None if only the owner can."""


@dataclass(frozen=True, kw_only=True)
class _Home:
    """All that the checks examine."""

    path: Path
    """Path of the home."""
    store: Store
    """Store of the home."""
    files: tuple[FileRecord, ...]
    """Every tenant's files."""
    jobs: tuple[JobRecord, ...]
    """Every tenant's jobs."""
    checkpoints: tuple[CheckpointRecord, ...]
    """Every tenant's checkpoints."""
    adapters: tuple[AdapterRecord, ...]
    """Every tenant's adapters that jobs have made."""
    loaded: tuple[AdapterRecord, ...]
    """Every tenant's adapters that were loaded from directories."""

    def orphan(self, path: Path, problem: str) -> Finding:
        """Return a finding about a path that no record names."""
        return Finding(
            about=str(path.relative_to(self.path)),
            problem=problem,
            remedy=f"is moved to {LOST_AND_FOUND} (the next server would remove it)",
            mend=partial(_move_away, self.path, path),
        )


def examine(home: Path, store: Store) -> list[Finding]:
    """Return all faults of a home that no server uses now."""
    try:
        # Records of a damaged database would only cause misleading findings.
        if faults := store.faults():
            return [_database_finding(fault) for fault in faults]
        content = _read(home, store)
    except StoreError as error:
        return [_database_finding(str(error))]
    checks = (
        _permissions,
        _leftovers,
        _files,
        _batches,
        _jobs,
        _job_folders,
        _checkpoints,
        _adapters,
    )
    return [finding for check in checks for finding in check(content)]


def _database_finding(problem: str) -> Finding:
    return Finding(about="database", problem=problem, remedy="restore a backup")


def _read(home: Path, store: Store) -> _Home:
    with store.read() as transaction:
        return _Home(
            path=home,
            store=store,
            files=transaction.all_of(FileRecord),
            jobs=transaction.all_of(JobRecord),
            checkpoints=transaction.all_of(CheckpointRecord),
            adapters=transaction.all_of(AdapterRecord),
            loaded=transaction.all_loaded_adapters(),
        )


def _permissions(home: _Home) -> Iterator[Finding]:
    """Check the modes of the home and of the files in it; its directories are only reachable
    through it.
    """
    for path in (home.path, *sorted(home.path.iterdir())):
        known = path.lstat()
        name = str(path) if path == home.path else path.name
        if path != home.path and not stat.S_ISREG(known.st_mode):
            continue
        if known.st_uid != os.geteuid():
            yield Finding(
                about=name, problem=f"belongs to another user ({known.st_uid})", remedy="chown it"
            )
        elif (mode := closed_mode(known.st_mode)) != stat.S_IMODE(known.st_mode):
            problem = f"other users may reach it (mode {stat.S_IMODE(known.st_mode):04o})"
            yield Finding(
                about=name,
                problem=problem,
                remedy=f"gets mode {mode:04o}",
                mend=partial(path.chmod, mode),
            )


def _leftovers(home: _Home) -> Iterator[Finding]:
    if (home.path / STAGE).exists():
        yield home.orphan(home.path / STAGE, "a backup that broke off has left it")


def _files(home: _Home) -> Iterator[Finding]:
    known = {record.id: record for record in home.files}
    there = {path.name: path for path in entries(home.path / "files")}
    for id, record in known.items():
        where = f"{id} ({record.filename!r} of {record.tenant})"
        if id not in there:
            yield Finding(
                about=where,
                problem="its content is not there",
                remedy="restore files/ID, or delete the file",
            )
        elif (num_bytes := there[id].stat().st_size) != record.num_bytes:
            problem = f"has {num_bytes} bytes; {record.num_bytes} were uploaded"
            yield Finding(
                about=where, problem=problem, remedy="restore files/ID, or delete the file"
            )
    for name in sorted(there.keys() - known.keys()):
        yield home.orphan(
            there[name],
            "an upload that broke off" if name.endswith(".part") else "no file on record",
        )


def _batches(home: _Home) -> Iterator[Finding]:
    with home.store.read() as transaction:
        unfinished = {record.id for record in transaction.unfinished_batches()}
    for path in sorted(entries(home.path / BATCHES_FOLDER)):
        if path.name not in unfinished:
            yield home.orphan(path, "results of no batch that is under way")


def _jobs(home: _Home) -> Iterator[Finding]:
    contents = {path.name for path in entries(home.path / "files")}
    folders = Folders(home.path / "jobs")
    for job in home.jobs:
        about = f"{job.id} of {job.tenant}"
        cancel = f"coserve jobs cancel --offline {job.id}"
        if job.status not in TRANSITIONS:
            yield Finding(
                about=about, problem=f"cannot be {job.status!r}", remedy="restore a backup"
            )
            continue
        if job.num_steps_done > job.num_steps:
            problem = f"has made {job.num_steps_done} of {job.num_steps} steps"
            yield Finding(
                about=about,
                problem=problem,
                remedy="restore a backup" if job.is_terminal else cancel,
            )
        # Exactly the jobs that are over have a time of their end.
        if job.is_terminal == (job.finished_at is None):
            word = "without" if job.is_terminal else "with"
            problem = f"is {job.status} {word} a time at which it ended"
            yield Finding(
                about=about,
                problem=problem,
                remedy="restore a backup" if job.is_terminal else cancel,
            )
        if job.is_terminal and folders.examples(job.id).exists():
            yield Finding(
                about=about,
                problem=f"is {job.status}, and what only a running job needs is there",
                remedy="is removed, as the next server would",
                mend=partial(job_writer_at(home.store, home.path).sweep, job.id),
            )
        if not job.is_terminal:
            yield from _what_it_needs(job, about, cancel, folders, contents)


def _what_it_needs(
    job: JobRecord, about: str, cancel: str, folders: Folders, contents: set[str]
) -> Iterator[Finding]:
    if job.status in ("queued", "running") and not job.validated:
        yield Finding(
            about=about, problem=f"is {job.status}, and its files have not been read", remedy=cancel
        )
    for file, examples in (
        (job.training_file, folders.examples(job.id)),
        (job.validation_file, folders.validation(job.id)),
    ):
        if file is None:
            continue
        if job.validated and not examples.is_file():
            problem = f"cannot run: its examples ({examples.name}) are not there"
            yield Finding(about=about, problem=problem, remedy=f"restore jobs/ID, or {cancel}")
        elif not job.validated and file not in contents:
            yield Finding(
                about=about,
                problem=f"cannot run: {file} is not there",
                remedy=f"restore it, or {cancel}",
            )
    if job.start is not None and not Path(job.start["directory"] or "").is_dir():
        problem = (
            f"cannot run: the adapter that it trains further is not at {job.start['directory']}"
        )
        yield Finding(about=about, problem=problem, remedy=f"restore it, or {cancel}")


def _job_folders(home: _Home) -> Iterator[Finding]:
    known, kept = {job.id for job in home.jobs}, {Path(each.directory) for each in home.checkpoints}
    kept |= {Path(each.directory) for each in home.adapters if each.directory is not None}
    folders = Folders(home.path / "jobs")
    for path in sorted(entries(home.path / "jobs")):
        if path.name not in known:
            yield home.orphan(path, "no job on record")
            continue
        for part in sorted(folders.parts(path.name)):
            yield home.orphan(part, "a file that broke off")
        for checkpoint in sorted(entries(path / "checkpoints")):
            if checkpoint not in kept:
                is_part = checkpoint.name.startswith(".part-")
                yield home.orphan(
                    checkpoint,
                    "a checkpoint that broke off" if is_part else "no checkpoint on record",
                )


def _checkpoints(home: _Home) -> Iterator[Finding]:
    unfinished = {job.id for job in home.jobs if not job.is_terminal}
    newest = {each.job: each for each in sorted(home.checkpoints, key=lambda each: each.step)}
    for each in home.checkpoints:
        directory = Path(each.directory)
        is_needed_whole = each.job in unfinished and newest[each.job] is each
        if (problem := _fault_of(directory, is_needed_whole=is_needed_whole)) is None:
            continue
        remedy = f"restore it, or delete the model {each.name}"
        if is_needed_whole:
            remedy = "restore it; or its job begins with its first step again"
        yield Finding(
            about=f"{each.name} of {each.tenant}", problem=f"{directory}: {problem}", remedy=remedy
        )


def _fault_of(directory: Path, *, is_needed_whole: bool) -> str | None:
    """Return what is wrong with the directory of an adapter; None if nothing is.

    Args:
        directory: Directory of the adapter or checkpoint.
        is_needed_whole: Whether a job resumes from it, so that its other files are needed too.
    """
    if not directory.is_dir():
        return "is not there"
    from safetensors import SafetensorError, safe_open

    try:
        needed = (
            _files_of_model(directory)
            if (directory / FULL_FILE).is_file()
            else [CONFIG_FILE, WEIGHTS_FILE]
        )
    except ModelError as error:
        return str(error)
    for name in needed + ([OPTIMIZER_FILE, POSITION_FILE] if is_needed_whole else []):
        if not (directory / name).is_file():
            return f"has no {name}"
        try:
            if name.endswith(".json"):
                json.loads((directory / name).read_text())
            else:
                with safe_open(directory / name, framework="np"):  # fails on a truncated file, too
                    pass
        except (SafetensorError, OSError, ValueError) as error:
            return f"{name} cannot be read: {error}"
    return None


def _files_of_model(directory: Path) -> list[str]:
    """Return the files of a model that full fine-tuning has made.

    Raises:
        ModelError: Some of its weights are missing.
    """
    return [_MODEL_CONFIG, *(path.name for path in weight_files(directory))]


def _adapters(home: _Home) -> Iterator[Finding]:
    of_checkpoints = {each.directory for each in home.checkpoints}
    for each in _with_directories(home.adapters):
        # Directories of checkpoints are examined by `_checkpoints`.
        if each.directory not in of_checkpoints and (problem := _fault(each)) is not None:
            remedy = f"restore it, or delete the model {each.name}"
            yield Finding(about=f"{each.name} of {each.tenant}", problem=problem, remedy=remedy)
    for each in _with_directories(home.loaded):
        if (problem := _fault(each)) is not None:
            remedy = "put it back, or unload it (/v1/unload_lora_adapter)"
            yield Finding(
                about=f"{each.name} of {each.tenant}, loaded", problem=problem, remedy=remedy
            )


def _with_directories(adapters: Iterable[AdapterRecord]) -> list[AdapterRecord]:
    return [each for each in adapters if each.directory is not None]


def _fault(adapter: AdapterRecord) -> str | None:
    directory = Path(adapter.directory or "")
    problem = _fault_of(directory, is_needed_whole=False)
    return None if problem is None else f"{directory}: {problem}"


def _move_away(home: Path, path: Path) -> None:
    number, target = 0, home / LOST_AND_FOUND / path.relative_to(home)
    target.parent.mkdir(parents=True, exist_ok=True)
    while target.exists():
        number += 1
        target = target.with_name(f"{path.name}.{number}")
    path.rename(target)
