"""The files of a job that starts, read by a thread beside steps."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coserve.engine.commands import JobStart
from coserve.jobs.datasets.examples import read_examples_file
from coserve.jobs.files.shared_files import SharedFiles
from coserve.tuning.examples import Example

_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The examples of a job."""

    examples: list[Example]
    validation: list[Example]

    @classmethod
    def read(cls, job: JobStart, shared: SharedFiles) -> Self:
        """Its examples, and its checkpoint ahead of the device; DataError, or StoreError of where
        they are shared.
        """
        for path in (job.examples, job.validation, job.checkpoint):
            if path is not None:
                shared.fetch(Path(path))
        if job.checkpoint is not None:
            _read_ahead(Path(job.checkpoint))
        elif job.start is not None and job.start.directory is not None:
            shared.fetch(Path(job.start.directory))
        return cls(
            examples=read_examples_file(job.examples),
            validation=[] if job.validation is None else read_examples_file(job.validation),
        )


def _read_ahead(directory: Path) -> None:
    """Have a directory's files in memory, so that the device need not wait for the disk; errors are
    for it to find.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            with path.open("rb") as file:
                while file.read(_READ_BYTES):
                    pass
