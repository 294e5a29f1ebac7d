"""Changes of jobs while no server runs. Calls block."""

from pathlib import Path

from coserve.errors import JobError
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.folders import Folders
from coserve.jobs.lifecycle.job_writer import JobWriter
from coserve.jobs.manager import check_not_over
from coserve.jobs.records import JobRecord
from coserve.jobs.sql.store import Store


def job_writer_at(store: Store, home: Path) -> JobWriter:
    """Return the writer of the jobs in a home."""
    return JobWriter(store, Files(store, home / "files"), Folders(home / "jobs"))


def cancel_job(store: Store, home: Path, id: str | None) -> JobRecord:
    """Cancel a job of any tenant as a server would; None: the newest job.

    Raises:
        JobError: There is no such job, or it has ended.
    """
    with store.read() as transaction:
        job = transaction.newest_job() if id is None else transaction.any_job(id)
    if job is None:
        raise JobError(
            "There are no fine-tuning jobs" if id is None else f"There is no fine-tuning job {id!r}"
        )
    check_not_over(job)
    return job_writer_at(store, home).end(job.id, "cancelled")
