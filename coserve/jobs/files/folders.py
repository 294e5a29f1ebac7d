"""Folders of jobs on disk: examples while a job needs them, and checkpoints.

Whatever is not in the store is removed, so that a process may end at any point between the writing
of a directory and of its record. What cannot be removed is logged, and removed at the next start.
"""

from collections.abc import Collection
from pathlib import Path

from coserve.adapters.file_names import CONFIG_FILE
from coserve.engine.jobs.checkpoint import JOB_FILES
from coserve.home import make_private
from coserve.jobs.files.shared_files import SharedFiles, discard, entries
from coserve.jobs.records import CheckpointRecord, JobRecord
from coserve.jobs.sql.transaction import Transaction

EXAMPLES = "examples.msgpack"
# Suffix of a file that is not complete yet.
PART = ".part"


class Folders:
    """Folders of all jobs, below one directory."""

    def __init__(self, directory: Path, shared: SharedFiles | None = None) -> None:
        """Open the folders below a directory.

        Args:
            directory: Directory of the folders.
            shared: Storage of the directory (default: this machine alone).
        """
        self._directory, self.shared = directory, shared or SharedFiles()
        self._thin = set[str]()  # directories that were thinned out, and are never filled again
        make_private(directory)

    def examples(self, job: str) -> Path:
        """Return the path of a job's training examples."""
        return self._directory / job / EXAMPLES

    def validation(self, job: str) -> Path:
        """Return the path of a job's validation examples."""
        return self._directory / job / "validation.msgpack"

    def checkpoints(self, job: str) -> Path:
        """Return the directory into which the engine writes a job's checkpoints."""
        return self._directory / job / "checkpoints"

    def contributions(self, job: str) -> Path:
        """Return the directory in which the nodes of a data-parallel job exchange updates while it
        trains.
        """
        return contributions_beside(self.checkpoints(job))

    def parts(self, job: str) -> list[Path]:
        """Return files of a job whose writing broke off, or is under way."""
        return [path for path in entries(self._directory / job) if path.name.endswith(PART)]

    def holds(self, directory: Path) -> bool:
        """Return whether a directory lies below this one."""
        return self._directory in directory.parents

    def thin_out(self, kept: Collection[CheckpointRecord], dropped: Collection[str]) -> bool:
        """Reduce the checkpoints of a running job: remove the dropped directories, and keep all
        checkpoints but the newest as adapters alone.

        Other files stay, since the engine may be writing them.

        Returns:
            Whether everything could be removed.
        """
        done = [self.shared.discard(Path(directory)) for directory in dropped]
        done += [self._thin_out(each) for each in sorted(kept, key=lambda each: each.step)[:-1]]
        return all(done)

    def sweep(self, job: str, kept: Collection[CheckpointRecord], *, is_terminal: bool) -> None:
        """Remove all unknown files of a job that no engine has. Of a job that is over, only
        adapters are kept.
        """
        known = {Path(each.directory) for each in kept}
        there = self.shared.entries(self.checkpoints(job))
        done = [self.shared.discard(path) for path in there if path not in known]
        done.append(self.shared.discard(self.contributions(job)))
        done.append(self.thin_out(kept, ()))
        if is_terminal:
            done += [self._thin_out(each) for each in kept]
            done.append(self.shared.discard(self.validation(job)))
            done += [discard(path) for path in self.parts(job)]
            # The examples go last: as long as they exist, the sweep is repeated at each start.
            if all(done):
                self.shared.discard(self.examples(job))

    def unswept(self) -> list[str]:
        """Return the ids of jobs whose examples exist, so that `sweep` has not finished."""
        there = (
            path.parent for path in self.shared.all_below(self._directory) if path.name == EXAMPLES
        )
        return sorted(path.name for path in there if path.parent == self._directory)

    def remove(self, job: str) -> None:
        """Remove the folder of a job, if there is one."""
        self.shared.discard(self._directory / job)

    def tidy(
        self, known: Collection[str], unfinished: Collection[str], kept: Collection[str]
    ) -> None:
        """Remove the folders of unknown jobs, and unknown checkpoints of jobs that are over.

        Args:
            known: Ids of all jobs.
            unfinished: Ids of jobs that have not ended.
            kept: Directories of all known checkpoints and adapters.
        """
        there = self.shared.all_below(self._directory)
        parts = [path.relative_to(self._directory).parts for path in there]
        # Parts of a checkpoint's path: job, "checkpoints", name of the checkpoint, file.
        for job in sorted({each[0] for each in parts}):
            for path in self.parts(job):
                discard(path)
            if job not in known:
                self.remove(job)
            # Unfinished jobs are swept when they are rolled back to resume.
            elif job not in unfinished:
                checkpoints = self.checkpoints(job)
                names = {
                    each[2]
                    for each in parts
                    if each[0] == job and each[1:2] == (checkpoints.name,) and each[2:]
                }
                for checkpoint in sorted(checkpoints / name for name in names):
                    if str(checkpoint) not in kept:
                        self.shared.discard(checkpoint)

    def resume_point(self, checkpoints: Collection[CheckpointRecord]) -> CheckpointRecord | None:
        """Return the newest checkpoint that has all files needed to resume; None if there is none,
        as after the end of a job.
        """
        for each in sorted(checkpoints, key=lambda each: each.step, reverse=True):
            if all(self.shared.is_file(Path(each.directory) / name) for name in JOB_FILES):
                return each
        return None

    def has_adapter(self, checkpoint: CheckpointRecord) -> bool:
        """Return whether a checkpoint exists, at least as an adapter."""
        return self.shared.is_file(Path(checkpoint.directory) / CONFIG_FILE)

    def _thin_out(self, checkpoint: CheckpointRecord) -> bool:
        """Reduce a checkpoint to its adapter; return whether that succeeded."""
        directory = checkpoint.directory
        if directory not in self._thin and all(
            self.shared.discard(Path(directory) / name) for name in JOB_FILES
        ):
            self._thin.add(directory)
        return directory in self._thin


def contributions_beside(checkpoints: Path) -> Path:
    """Return the directory of contributions beside a job's directory of checkpoints."""
    return checkpoints.with_name("contributions")


def prune_records(
    transaction: Transaction, job: JobRecord, *, is_terminal: bool
) -> tuple[tuple[CheckpointRecord, ...], tuple[str, ...]]:
    """Delete records of unlisted checkpoints, except the newest one of a job that has not ended.

    Returns:
        The records that are left, and the directories of the deleted ones.
    """
    checkpoints = transaction.all_checkpoints(job.id)
    kept = tuple(
        each
        for each in checkpoints
        if each.listed or (not is_terminal and each.step == checkpoints[-1].step)
    )
    dropped = tuple(each for each in checkpoints if each not in kept)
    for each in dropped:
        transaction.remove_checkpoint(job.id, each.step)
    return kept, tuple(each.directory for each in dropped)
