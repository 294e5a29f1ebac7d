"""Writer of every change of a job: whole or not at all, into the store and to disk. Calls block."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from coserve.engine.commands import AdapterRef, JobStart
from coserve.errors import JobError, LimitError
from coserve.jobs.datasets.validation import Validated
from coserve.jobs.deaths import Deaths, after_death
from coserve.jobs.files.blobs import QUOTA_RETRY_S, RESULTS, Files
from coserve.jobs.files.folders import Folders, prune_records
from coserve.jobs.lifecycle.outcome import add_model, num_trained_tokens
from coserve.jobs.lifecycle.state import is_legal
from coserve.jobs.metrics.results import FILENAME, results_csv
from coserve.jobs.records import (
    CheckpointRecord,
    FileRecord,
    JobRecord,
    JobStatus,
    adapter_of,
    job_event,
    new_id,
)
from coserve.jobs.settings import JobSettings
from coserve.jobs.sql.store import Store
from coserve.jobs.sql.transaction import Transaction

# Error code of a job that has reached its time limit.
TIMEOUT = "job_timeout"


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The point from which a job resumes, or the reason why it does not."""

    job: JobRecord
    """The job's record, without what came after the checkpoint."""
    checkpoint: CheckpointRecord | None = None
    """The checkpoint; None: the job starts anew."""
    listed_step: int | None = None
    """Step of the newest listed checkpoint; None: there is none."""
    is_done: bool = False
    """Whether the job has made all of its steps and its model is on disk."""
    deaths: Deaths | None = None
    """Engine deaths that the job is suspected of; None: it is not suspected."""

    @property
    def are_deaths_too_many(self) -> bool:
        """Return whether the job is to fail instead; then nothing was rolled back."""
        return self.deaths is not None and self.deaths.are_too_many


class JobWriter:
    """The only writer of a job's status."""

    def __init__(self, store: Store, files: Files, folders: Folders) -> None:
        self._store, self._files, self._folders = store, files, folders

    # -- questions ------------------------------------------------------------------

    def find(self, tenant: str, id: str) -> JobRecord | None:
        """Return a tenant's job; None if there is none."""
        with self._store.read() as transaction:
            return transaction.job(tenant, id)

    def any_job(self, id: str) -> JobRecord | None:
        """Return a job of any tenant; None if there is none."""
        with self._store.read() as transaction:
            return transaction.any_job(id)

    def job(self, id: str) -> JobRecord:
        """Return a job of any tenant, which must exist."""
        record = self.any_job(id)
        assert record is not None, f"job {id} is not in the store"
        return record

    def start_of(self, point: ResumePoint, *, model: str = "") -> JobStart:
        """Return the command that starts a job in an engine.

        Args:
            point: Point from which the job resumes.
            model: See `JobStart`.
        """
        job, settings = point.job, JobSettings.from_data(point.job.settings)
        return JobStart(
            id=job.id,
            name=job.name,
            examples=str(self._folders.examples(job.id)),
            validation=None
            if job.validation_file is None
            else str(self._folders.validation(job.id)),
            config=settings.tuning_config(job.num_examples),
            adapter=settings.adapter,
            start=None if job.start is None else AdapterRef(**job.start),
            checkpoint=None if point.checkpoint is None else point.checkpoint.directory,
            checkpoints=str(self._folders.checkpoints(job.id)),
            checkpoint_every_steps=settings.checkpoint_every_steps,
            keep_best=settings.keep_best,
            tenant=job.tenant,
            alone_until_step=0 if point.deaths is None else point.deaths.alone_until_step,
            model=model,
            data_parallel=settings.data_parallel,
        )

    def require_room(self, id: str) -> None:
        """Raise StoreError if a change of a job cannot be written now."""
        with self._store.write() as transaction:
            job = transaction.any_job(id)
            assert job is not None, f"job {id} is not in the store"
            # The value does not matter: the store has to accept a write.
            transaction.change_job(id, status=job.status)

    # -- from the beginning ---------------------------------------------------------

    def tidy(self) -> tuple[JobRecord, ...]:
        """Remove at the start what an earlier process left half done. This needs no free disk
        space.

        Returns:
            The unfinished jobs, none of which an engine has.
        """
        self._files.tidy()
        with self._store.read() as transaction:
            jobs = transaction.unfinished_jobs()
            known, kept = transaction.job_ids(), transaction.adapter_directories()
        self._folders.tidy(known, {job.id for job in jobs}, kept)
        # Repeat the sweeps of jobs that ended just before the earlier process did.
        for id in self._folders.unswept():
            with self._store.read() as transaction:
                record, checkpoints = transaction.any_job(id), transaction.all_checkpoints(id)
            if record is not None and record.is_terminal:
                self._folders.sweep(id, checkpoints, is_terminal=True)
        return jobs

    def add(self, record: JobRecord, max_jobs: int | None = None) -> None:
        """Add a new job.

        Raises:
            JobError: A file does not exist, or was not uploaded for fine-tuning.
            LimitError: The tenant has max_jobs unfinished jobs.
        """
        with self._store.write() as transaction:
            # Counted in this transaction, so that two requests cannot both take the last place.
            num_jobs = transaction.num_unfinished_jobs(record.tenant)
            if max_jobs is not None and num_jobs >= max_jobs:
                raise LimitError(
                    f"You have {num_jobs} jobs that have not ended, and may have {max_jobs}: "
                    "cancel one, or wait.",
                    what="jobs",
                    retry_after_s=QUOTA_RETRY_S,
                )
            for field in ("training_file", "validation_file"):
                if (id := getattr(record, field)) is None:
                    continue
                file = transaction.file(record.tenant, id)
                if file is None:
                    raise JobError(f"{field} {id!r} does not exist: upload it first", param=field)
                if file.purpose != "fine-tune":
                    raise JobError(
                        f"{field} {id} was uploaded for {file.purpose!r}, not for 'fine-tune'",
                        param=field,
                    )
            _check_start(transaction, record, self._folders)
            transaction.add_job(record)
            transaction.add_event(job_event(record, f"Created fine-tuning job: {record.id}"))
            transaction.add_event(
                job_event(record, f"Validating training file: {record.training_file}")
            )

    def change(self, id: str, status: JobStatus, message: str | None = None) -> JobRecord:
        """Change the status of a job that has not ended, and add an event with the message."""
        with self._store.write() as transaction:
            job = transaction.any_job(id)
            assert job is not None, f"job {id} is not in the store"
            job = _change(transaction, job, status)
            if message is not None:
                transaction.add_event(job_event(job, message))
        return job

    def validated(self, job: JobRecord, result: Validated) -> JobRecord:
        """Write what was found in a job's files, and queue the job unless it is paused."""
        with self._store.write() as transaction:
            if result.num_cut:
                length = job.settings["max_sequence_length"]
                message = (
                    f"{result.num_cut} of {result.num_examples} examples were cut "
                    f"to {length} tokens"
                )
                transaction.add_event(job_event(job, message, level="warn"))
            for message in result.warnings:
                transaction.add_event(job_event(job, message, level="warn"))
            message = (
                "Files validated, moving job to queued state"
                if job.status != "paused"
                else "Files validated"
            )
            transaction.add_event(job_event(job, message))
            return _change(
                transaction,
                job,
                "paused" if job.status == "paused" else "queued",
                num_examples=result.num_examples,
                num_tokens=result.num_tokens,
                num_steps=result.num_steps,
            )

    # -- with engines that come and go ----------------------------------------------

    def lose_engine(
        self, lost: Collection[str], under_way: Collection[str] | None
    ) -> tuple[tuple[JobRecord, ...], frozenset[str]]:
        """Write that the engine of these jobs has died: they are queued for the next one.

        Args:
            lost: Jobs that the engine had.
            under_way: Jobs that may have caused the death; None: any.

        Returns:
            The jobs that are queued now, and the ids of those that have caused too many deaths.
        """
        with self._store.write() as transaction:
            jobs = [
                job
                for job in transaction.unfinished_jobs()
                # A paused job stays paused, whether an engine has it or not.
                if job.id in lost and job.status != "paused"
            ]
            queued = tuple(_change(transaction, job, "queued") for job in jobs)
            blamed = {
                job.id: job.num_steps_done
                for job in jobs
                if under_way is None or job.id in under_way
            }
            suspected = after_death(transaction.deaths(), blamed)
            transaction.put_deaths(suspected)
        return queued, frozenset(id for id in blamed if suspected[id].are_too_many)

    def roll_back(self, id: str) -> ResumePoint:
        """Delete everything that a job did after its newest checkpoint.

        Nothing is deleted if the job is done or has caused too many engine deaths.
        """
        with self._store.read() as transaction:
            checkpoints, deaths = transaction.all_checkpoints(id), transaction.deaths().get(id)
        job = self.job(id)
        # The server may have ended before it could write that the job has failed.
        if deaths is not None and deaths.are_too_many:
            return ResumePoint(job=job, deaths=deaths)
        checkpoint = self._folders.resume_point(checkpoints)
        last = checkpoints[-1] if checkpoints else None
        # The very last checkpoint is the adapter alone, if the engine wrote it after the end.
        is_final = last is not None and last.listed and last.step == job.num_steps
        is_done = (
            last is not None
            and checkpoint is not last
            and is_final
            and self._folders.has_adapter(last)
        )
        with self._store.write() as transaction:
            if not is_done:
                # Later steps run again, and would be on record twice.
                job = transaction.roll_back(id, 0 if checkpoint is None else checkpoint.step)
            kept, _ = prune_records(transaction, job, is_terminal=False)
        # After the commit: a crash before it leaves unknown files, never records without files.
        self._folders.sweep(id, kept, is_terminal=False)
        listed_step = max((each.step for each in kept if each.listed), default=None)
        return ResumePoint(
            job=job, checkpoint=checkpoint, listed_step=listed_step, is_done=is_done, deaths=deaths
        )

    # -- endings --------------------------------------------------------------------

    def end(
        self,
        id: str,
        status: Literal["succeeded", "failed", "cancelled"],
        error: dict[str, Any] | None = None,
    ) -> JobRecord:
        """End a job; a job that has ended before is returned unchanged.

        Args:
            id: Id of the job.
            status: Final status.
            error: Error of a failed job: code, message, param.
        """
        job = self.job(id)
        if job.is_terminal:
            return job
        # Written before the record that names it; an orphan is removed at the next start.
        results = self._write_results(job) if status == "succeeded" else None
        try:
            job, kept = self._record_end(job, status, error, results)
        except BaseException:  # the next attempt writes a file of its own
            if results is not None:
                self._files.remove_blob(results.id)
            raise
        self._folders.sweep(id, kept, is_terminal=True)
        return job

    def _record_end(
        self,
        job: JobRecord,
        status: Literal["succeeded", "failed", "cancelled"],
        error: dict[str, Any] | None,
        results: FileRecord | None,
    ) -> tuple[JobRecord, tuple[CheckpointRecord, ...]]:
        """Write that a job has ended; return its record and the checkpoints that are kept."""
        with self._store.write() as transaction:
            if error is not None and error["code"] == TIMEOUT:
                _list_newest(transaction, job)
            transaction.forget_deaths(job.id)
            # After `_list_newest`: unlisted checkpoints are deleted here.
            kept, _ = prune_records(transaction, job, is_terminal=True)
            if status == "succeeded":
                assert results is not None
                transaction.add_file(results)
                add_model(transaction, job, kept)
                transaction.add_event(job_event(job, "The job has successfully completed"))
            elif error is not None:
                transaction.add_event(
                    job_event(job, f"The job failed: {error['message']}", level="error")
                )
            else:
                transaction.add_event(job_event(job, "The job was cancelled"))
            job = _change(
                transaction,
                job,
                status,
                error=error,
                finished_at=int(time.time()),
                result_file=results.id if results is not None else None,
                trained_tokens=num_trained_tokens(transaction, job)
                if status == "succeeded"
                else None,
            )
        return job, kept

    def sweep(self, id: str) -> None:
        """Remove files that a job needs no more after its end."""
        with self._store.read() as transaction:
            kept = transaction.all_checkpoints(id)
        self._folders.sweep(id, kept, is_terminal=True)

    def _write_results(self, job: JobRecord) -> FileRecord:
        with self._store.read() as transaction:
            content = results_csv(transaction.metrics(job.id))
        id = new_id("file-")
        return FileRecord(
            id=id,
            tenant=job.tenant,
            purpose=RESULTS,
            filename=FILENAME,
            num_bytes=self._files.write_blob(id, [content]),
            created_at=int(time.time()),
        )


def _check_start(transaction: Transaction, job: JobRecord, folders: Folders) -> None:
    """Raise JobError if the adapter that a job is to train further was deleted after its lookup."""
    directory = None if job.start is None else job.start["directory"]
    # Adapters elsewhere were loaded by clients, and no job's record names them.
    if directory is None or not folders.holds(Path(directory)):
        return
    if not transaction.adapters_in(directory):
        raise JobError(f"{job.model} does not exist any more", param="model")


def _change(
    transaction: Transaction, job: JobRecord, status: JobStatus, **values: Any
) -> JobRecord:
    assert is_legal(job.status, status), f"job {job.id} cannot go from {job.status} to {status}"
    return transaction.change_job(job.id, status=status, **values)


def _list_newest(transaction: Transaction, job: JobRecord) -> None:
    """Keep the newest checkpoint of a job that is to end, also if it was not promised."""
    if checkpoints := transaction.all_checkpoints(job.id):
        newest = transaction.put_checkpoint(replace(checkpoints[-1], listed=True))
        transaction.put_adapter(adapter_of(job, newest.name, newest.directory))
