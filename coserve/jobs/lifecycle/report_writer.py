"""Writer of an engine's reports: it records them in the store, and returns the events that follow
for the jobs' states.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.files.folders import Folders, prune_records
from coserve.jobs.lifecycle.events import (
    CheckpointRecorded,
    EngineEnded,
    EngineReported,
    Event,
    RecordWritten,
    StepsRecorded,
)
from coserve.jobs.messages import Checkpointed
from coserve.jobs.metrics.results import message_of, metrics_of
from coserve.jobs.names import checkpoint_name
from coserve.jobs.records import CheckpointRecord, JobRecord, Level, adapter_of, job_event, new_id
from coserve.jobs.sql.store import Store
from coserve.jobs.sql.transaction import Transaction


@dataclass(kw_only=True)
class RecordedReports:
    """Consequences of reports that are on record."""

    events: dict[str, list[Event]] = field(default_factory=dict)
    """Events for the states of jobs, by job, in order."""
    published: dict[str, JobRecord] = field(default_factory=dict)
    """Live jobs that serve a version, by id."""
    num_checkpoints: int = 0
    """Number of checkpoints that were recorded."""

    def add(self, job: str, event: Event) -> None:
        """Add an event of a job."""
        self.events.setdefault(job, []).append(event)


class JobReportWriter:
    """A writer that records each batch of reports whole, or not at all."""

    def __init__(self, store: Store, folders: Folders) -> None:
        self._store, self._folders = store, folders

    def write(
        self,
        reports: Sequence[EngineReported],
        last_step_s: Mapping[str, float | None],
        now_s: float,
    ) -> RecordedReports:
        """Write the reports of the living engine's jobs. Blocks; may be repeated after a failure.

        Args:
            reports: Reports in the order in which they arrived.
            last_step_s: Ids of the living engine's jobs, with the engine's time of their last
                optimizer step in this run, if any.
            now_s: Time of these reports, by the server's clock.
        """
        batch = _ReportBatch(last_step_s, now_s)
        with self._store.write() as transaction:
            for report in reports:
                batch.write(transaction, report)
            # Clear jobs that have trained far enough beyond the death of which they were suspected.
            for id, deaths in transaction.deaths().items():
                if (
                    id in batch.stepped
                    and batch.stepped[id].num_steps_done >= deaths.alone_until_step
                ):
                    transaction.forget_deaths(id)
            pruned = [
                (old, prune_records(transaction, _job(transaction, id), is_terminal=False))
                for id, old in batch.replaced.items()
            ]
        # Files last: the transaction that stopped naming them is committed.
        self._folders.thin_out((), batch.too_late)
        for old, (kept, dropped) in pruned:
            self._folders.thin_out(kept, [*old, *dropped])
        return batch.finished()


class _ReportBatch:
    """Reports that are written in one transaction."""

    def __init__(self, last_step_s: Mapping[str, float | None], now_s: float) -> None:
        self._recorded, self._now_s = RecordedReports(), now_s
        self._last_step_s = dict(last_step_s)
        self._num_steps: dict[str, int] = {}
        # Jobs that have made steps, as they are now.
        self.stepped: dict[str, JobRecord] = {}
        # Directories of checkpoints that newer ones have replaced, by job.
        self.replaced: dict[str, list[str]] = {}
        # Directories of checkpoints of jobs that are over.
        self.too_late: list[str] = []

    def write(self, transaction: Transaction, report: EngineReported) -> None:
        """Write one report."""
        for event in report.events:
            if event.job in self._last_step_s:
                self._write_event(transaction, event)
        for checkpoint in report.checkpoints:
            if checkpoint.job in self._last_step_s:
                self._write_checkpoint(transaction, checkpoint)
            # Checkpoints of unfinished jobs without an engine are swept when those resume.
            elif (job := transaction.any_job(checkpoint.job)) is None or job.is_terminal:
                self.too_late.append(checkpoint.directory)

    def finished(self) -> RecordedReports:
        """Return the consequences, once the transaction is committed."""
        for id, job in self.stepped.items():
            last_step_s = self._last_step_s[id]
            assert last_step_s is not None, "it has made a step"
            steps = StepsRecorded(
                num_steps=self._num_steps[id], now_s=self._now_s, last_step_s=last_step_s
            )
            self._recorded.events[id] = [
                RecordWritten(job=job),
                steps,
                *self._recorded.events.get(id, ()),
            ]
        return self._recorded

    def _write_event(self, transaction: Transaction, event: JobEvent) -> None:
        job = _job(transaction, event.job)
        if event.kind in ("step", "evaluation"):
            last_step_s = self._last_step_s[event.job]
            # The first step of a run has no predecessor, and therefore no rate.
            seconds = 0.0 if last_step_s is None else event.now_s - last_step_s
            data = metrics_of(
                event,
                num_steps=job.num_steps,
                tokens_per_s=event.num_tokens / seconds if seconds else None,
            )
            # No norm: the gradient was not finite, and the step changed nothing.
            level: Level = "warn" if event.kind == "step" and event.norm is None else "info"
            message = message_of(event, job.num_steps)
            transaction.add_event(
                job_event(job, message, level=level, kind=event.kind, step=event.step, data=data)
            )
        if event.kind == "step":
            self._last_step_s[job.id] = event.now_s
            self._num_steps[job.id] = self._num_steps.get(job.id, 0) + 1
            self.stepped[job.id] = transaction.change_job(job.id, num_steps_done=event.step)
        elif event.kind == "version":
            self._recorded.published[job.id] = job
        elif event.kind in ("succeeded", "failed", "cancelled"):
            self._recorded.add(job.id, EngineEnded(outcome=event.kind, message=event.message))

    def _write_checkpoint(self, transaction: Transaction, checkpoint: Checkpointed) -> None:
        """Write a checkpoint, which may replace another of the same step."""
        job = _job(transaction, checkpoint.job)
        old = [
            each.directory
            for each in transaction.all_checkpoints(job.id)
            if each.step == checkpoint.step
        ]
        record = transaction.put_checkpoint(
            CheckpointRecord(
                id=new_id("ftckpt_"),
                tenant=job.tenant,
                job=job.id,
                created_at=int(time.time()),
                step=checkpoint.step,
                name=checkpoint_name(job.name, checkpoint.step),
                directory=checkpoint.directory,
                listed=checkpoint.listed,
            )
        )
        if record.listed:
            # A repeated step replaces its checkpoint, whose event is on record already.
            if transaction.adapter(job.tenant, record.name) is None:
                transaction.add_event(
                    job_event(job, f"Checkpoint created at step {record.step}: {record.name}")
                )
            transaction.put_adapter(adapter_of(job, record.name, record.directory))
            self._recorded.add(job.id, CheckpointRecorded(step=record.step))
        self._recorded.num_checkpoints += 1
        self.replaced.setdefault(job.id, []).extend(
            each for each in old if each != checkpoint.directory
        )


def _job(transaction: Transaction, id: str) -> JobRecord:
    job = transaction.any_job(id)
    assert job is not None, f"job {id} is not in the store"
    return job
