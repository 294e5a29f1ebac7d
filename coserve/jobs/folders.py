"""What jobs keep on disk: examples while a job needs them, and checkpoints, each in the job's own folder.

Whatever the store does not know is removed, so that a process may end anywhere between a directory and its record.
"""

from collections.abc import Collection
from pathlib import Path

from coserve.engine.checkpoint import can_resume, keep_adapter_alone
from coserve.jobs.files import remove_tree
from coserve.jobs.records import CheckpointRecord, JobRecord
from coserve.jobs.store import Transaction


class Folders:
    """Below one directory, a folder for each job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def examples(self, job: str) -> Path:
        """The training file's examples."""
        return self._directory / job / "examples.msgpack"

    def validation(self, job: str) -> Path:
        """The validation file's."""
        return self._directory / job / "validation.msgpack"

    def checkpoints(self, job: str) -> Path:
        """Where the engine writes checkpoints."""
        return self._directory / job / "checkpoints"

    def holds(self, directory: Path) -> bool:
        """Whether a directory is in here."""
        return self._directory in directory.parents

    def thin_out(self, kept: Collection[CheckpointRecord], dropped: Collection[str]) -> None:
        """While a job runs: remove the directories that were dropped, and keep all checkpoints but the newest as
        adapters alone. What else is there, the engine may be writing just now.
        """
        for directory in dropped:
            remove_tree(Path(directory))
        for each in sorted(kept, key=lambda each: each.step)[:-1]:
            keep_adapter_alone(each.directory)

    def sweep(self, job: str, kept: Collection[CheckpointRecord], *, is_terminal: bool) -> None:
        """When no engine has the job: remove all that is not known. Of a job that is over, adapters alone are kept."""
        directories = {Path(each.directory) for each in kept}
        for path in self.checkpoints(job).iterdir() if self.checkpoints(job).is_dir() else ():
            if path not in directories:
                remove_tree(path)
        self.thin_out(kept, ())
        if is_terminal:
            for each in kept:
                keep_adapter_alone(each.directory)
            self.validation(job).unlink(missing_ok=True)
            self.examples(job).unlink(missing_ok=True)  # the last: as long as it is there, this has not been done

    def unswept(self) -> list[str]:
        """Jobs whose examples are there."""
        return [path.name for path in self._directory.iterdir() if self.examples(path.name).exists()]

    def tidy(self, known: Collection[str]) -> None:
        """Remove the folders of jobs that are not known."""
        for path in self._directory.iterdir():
            if path.name not in known:
                remove_tree(path)


def prune_records(
    transaction: Transaction, job: JobRecord, *, is_terminal: bool
) -> tuple[tuple[CheckpointRecord, ...], tuple[str, ...]]:
    """Forget checkpoints that are only there so that nothing is lost, except the newest of a job that has not ended;
    returns what is left, and the directories of the others.
    """
    found = transaction.all_checkpoints(job.id)
    kept = tuple(each for each in found if each.listed or (not is_terminal and each.step == found[-1].step))
    dropped = tuple(each for each in found if each not in kept)
    for each in dropped:
        transaction.remove_checkpoint(job.id, each.step)
    return kept, tuple(each.directory for each in dropped)


def resume_point(checkpoints: Collection[CheckpointRecord]) -> CheckpointRecord | None:
    """The newest checkpoint that has all that it takes to resume."""
    usable = [each for each in checkpoints if can_resume(each.directory)]
    return max(usable, key=lambda each: each.step, default=None)
