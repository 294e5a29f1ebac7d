"""What jobs keep on disk: examples while a job needs them, and checkpoints, each in the job's own folder.

Whatever the store does not know is removed, so that a process may end anywhere between a directory and its record. What
cannot be removed is logged, and tried again at the next start.
"""

import logging
from collections.abc import Collection
from pathlib import Path

from coserve.engine.checkpoint import can_resume, keep_adapter_alone
from coserve.home import make_private
from coserve.jobs.files import discard
from coserve.jobs.records import CheckpointRecord, JobRecord
from coserve.jobs.transaction import Transaction

_log = logging.getLogger(__name__)


class Folders:
    """Below one directory, a folder for each job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_private(directory)

    def examples(self, job: str) -> Path:
        """The training file's examples."""
        return self._directory / job / "examples.msgpack"

    def validation(self, job: str) -> Path:
        """The validation file's."""
        return self._directory / job / "validation.msgpack"

    def checkpoints(self, job: str) -> Path:
        """Where the engine writes checkpoints."""
        return self._directory / job / "checkpoints"

    def contributions(self, job: str) -> Path:
        """Where the nodes of a data-parallel job exchange what they have learned, as long as it trains."""
        return contributions_beside(self.checkpoints(job))

    def holds(self, directory: Path) -> bool:
        """Whether a directory is in here."""
        return self._directory in directory.parents

    def thin_out(self, kept: Collection[CheckpointRecord], dropped: Collection[str]) -> bool:
        """While a job runs: remove the directories that were dropped, and keep all checkpoints but the newest as
        adapters alone. What else is there, the engine may be writing just now. Returns whether all of it could be done.
        """
        done = [discard(Path(directory)) for directory in dropped]
        done += [_thin_out(each) for each in sorted(kept, key=lambda each: each.step)[:-1]]
        return all(done)

    def sweep(self, job: str, kept: Collection[CheckpointRecord], *, is_terminal: bool) -> None:
        """When no engine has the job: remove all that is not known. Of a job that is over, adapters alone are kept."""
        known = {Path(each.directory) for each in kept}
        done = [discard(path) for path in entries(self.checkpoints(job)) if path not in known]
        done.append(discard(self.contributions(job)))
        done.append(self.thin_out(kept, ()))
        if is_terminal:
            done += [_thin_out(each) for each in kept]
            done.append(discard(self.validation(job)))
            if all(done):
                discard(self.examples(job))  # the last: as long as it is there, this has not been done

    def unswept(self) -> list[str]:
        """Jobs whose examples are there."""
        return [path.name for path in self._directory.iterdir() if self.examples(path.name).exists()]

    def remove(self, job: str) -> None:
        """Remove all of a job's; no error if there is nothing."""
        discard(self._directory / job)

    def tidy(self, known: Collection[str], unfinished: Collection[str], kept: Collection[str]) -> None:
        """Remove the folders of jobs that are not known; and of those that are over, the checkpoints that are not.

        kept: the directories that are.
        """
        for path in self._directory.iterdir():
            if path.name not in known:
                discard(path)
            elif path.name not in unfinished:
                for checkpoint in entries(self.checkpoints(path.name)):
                    if str(checkpoint) not in kept:
                        discard(checkpoint)


def contributions_beside(checkpoints: Path) -> Path:
    """Of the job that has its checkpoints there."""
    return checkpoints.with_name("contributions")


def entries(directory: Path) -> list[Path]:
    """What is in it; nothing if it is not there, or cannot be read."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _log.error("%s cannot be read: %s", directory, error)
        return []


def _thin_out(checkpoint: CheckpointRecord) -> bool:
    """Keep its adapter alone; returns whether that could be done."""
    try:
        keep_adapter_alone(checkpoint.directory)
    except OSError as error:
        _log.error("%s: what only its job needed cannot be removed: %s", checkpoint.directory, error)
        return False
    return True


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
