"""Files of a job that starts, read by a thread beside steps."""

from contextlib import suppress
from pathlib import Path

from coserve.engine.commands import JobExamples, JobStart
from coserve.jobs.datasets.examples import read_examples_file
from coserve.jobs.files.shared_files import SharedFiles

_READ_BYTES = 1 << 20


def read_job_files(job: JobStart, shared: SharedFiles) -> JobExamples:
    """Return the examples of a job, with its checkpoint read ahead of the device.

    Raises:
        DataError: a file of examples cannot be read.
        StoreError: the place where files are shared cannot be used.
    """
    for path in (job.examples, job.validation, job.checkpoint):
        if path is not None:
            shared.fetch(Path(path))
    if job.checkpoint is not None:
        _read_ahead(Path(job.checkpoint))
    elif job.start is not None and job.start.directory is not None:
        shared.fetch(Path(job.start.directory))
    return JobExamples(
        examples=read_examples_file(job.examples),
        validation=() if job.validation is None else read_examples_file(job.validation),
    )


def _read_ahead(directory: Path) -> None:
    """Read a directory's files into the system's cache, so that the device need not wait for the
    disk; the device finds any error itself.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            with path.open("rb") as file:
                while file.read(_READ_BYTES):
                    pass
