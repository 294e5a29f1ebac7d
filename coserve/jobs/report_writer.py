"""From what an engine reports of jobs to what the store keeps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.folders import Folders, prune_records
from coserve.jobs.messages import Checkpointed
from coserve.jobs.names import checkpoint_name
from coserve.jobs.records import AdapterRecord, CheckpointRecord, EventRecord, JobRecord, Level, new_id
from coserve.jobs.results import message_of, metrics_of
from coserve.jobs.store import Store
from coserve.jobs.transaction import Transaction


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an engine reported at once."""

    events: Sequence[JobEvent] = ()
    checkpoints: Sequence[Checkpointed] = ()

    @property
    def jobs(self) -> set[str]:
        """Those that it is about."""
        return {event.job for event in self.events} | {each.job for each in self.checkpoints}


@dataclass(kw_only=True)
class Recorded:
    """What of reports matters beyond the records.

    num_steps: how many each job has made. last_step: the last of them. num_checkpoints: of all. ended: jobs that have
    succeeded or failed, with the error. left: jobs that the engine does not run any more. published: those that
    have published.
    """

    num_steps: dict[str, int] = field(default_factory=dict)
    last_step: dict[str, int] = field(default_factory=dict)
    num_checkpoints: int = 0
    ended: dict[str, str | None] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    published: dict[str, JobRecord] = field(default_factory=dict)


class JobReportWriter:
    """Writes reports down: each batch whole, or not at all."""

    def __init__(self, store: Store, folders: Folders) -> None:
        self._store, self._folders = store, folders
        self._last_step_s: dict[str, float] = {}  # by the engine's clock

    def begin(self, job: str) -> None:
        """The engine has taken it: steps are timed anew."""
        self._last_step_s.pop(job, None)

    def record(self, reports: Sequence[Report], is_wanted: Callable[[str], bool]) -> Recorded:
        """Blocks. is_wanted: whether a job is this engine's to report on. Safe to do again if it failed."""
        recorded, replaced = Recorded(), dict[str, list[str]]()
        too_late: list[str] = []
        last_step_s = dict(self._last_step_s)
        with self._store.write() as transaction:
            for report in reports:
                for event in report.events:
                    if is_wanted(event.job):
                        self._event(transaction, event, recorded, last_step_s)
                for checkpoint in report.checkpoints:
                    if is_wanted(checkpoint.job):
                        recorded.num_checkpoints += 1
                        replaced.setdefault(checkpoint.job, []).extend(self._checkpoint(transaction, checkpoint))
                    elif (job := transaction.any_job(checkpoint.job)) is None or job.is_terminal:
                        too_late.append(checkpoint.directory)
            for id, deaths in transaction.deaths().items():
                if recorded.last_step.get(id, 0) >= deaths.alone_until_step:
                    transaction.forget_deaths(id)
            pruned = [
                (old, prune_records(transaction, self._job(transaction, id), is_terminal=False))
                for id, old in replaced.items()
            ]
        self._last_step_s = last_step_s
        self._folders.thin_out((), too_late)
        for old, (kept, dropped) in pruned:
            self._folders.thin_out(kept, [*old, *dropped])
        return recorded

    def _event(
        self, transaction: Transaction, event: JobEvent, recorded: Recorded, last_step_s: dict[str, float]
    ) -> None:
        job = self._job(transaction, event.job)
        if event.kind in ("step", "evaluation"):
            seconds = event.now_s - last_step_s.get(event.job, event.now_s)
            data = metrics_of(
                event, num_steps=job.num_steps, tokens_per_s=event.num_tokens / seconds if seconds else None
            )
            level: Level = "warn" if event.kind == "step" and event.norm is None else "info"
            message = message_of(event, job.num_steps)
            transaction.add_event(job_event(job, message, level=level, kind=event.kind, step=event.step, data=data))
        if event.kind == "step":
            last_step_s[event.job] = event.now_s
            transaction.change_job(job.id, num_steps_done=event.step)
            recorded.num_steps[job.id] = recorded.num_steps.get(job.id, 0) + 1
            recorded.last_step[job.id] = event.step
        elif event.kind == "version":
            recorded.published[job.id] = job
        elif event.kind in ("succeeded", "failed", "cancelled"):
            recorded.left.add(job.id)
            last_step_s.pop(job.id, None)
            if event.kind != "cancelled":
                recorded.ended[job.id] = None if event.kind == "succeeded" else event.message

    def _job(self, transaction: Transaction, id: str) -> JobRecord:
        job = transaction.any_job(id)
        assert job is not None, f"job {id} is not in the store"
        return job

    def _checkpoint(self, transaction: Transaction, checkpoint: Checkpointed) -> list[str]:
        """Returns the directory whose place it takes, if any."""
        job = self._job(transaction, checkpoint.job)
        old = [each.directory for each in transaction.all_checkpoints(job.id) if each.step == checkpoint.step]
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
            if transaction.adapter(job.tenant, record.name) is None:
                transaction.add_event(job_event(job, f"Checkpoint created at step {record.step}: {record.name}"))
            transaction.put_adapter(adapter_of(job, record.name, record.directory))
        return [directory for directory in old if directory != checkpoint.directory]


def job_event(
    job: JobRecord,
    message: str,
    *,
    level: Level = "info",
    kind: str = "",
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> EventRecord:
    """An event of a job, as of now."""
    return EventRecord(
        id=new_id("ftevent-"),
        tenant=job.tenant,
        job=job.id,
        created_at=int(time.time()),
        level=level,
        message=message,
        kind=kind,
        step=step,
        data=data or {},
    )


def adapter_of(job: JobRecord, name: str, directory: str | None) -> AdapterRecord:
    """An adapter that a job has made."""
    return AdapterRecord(
        tenant=job.tenant, name=name, base=job.base, directory=directory, job=job.id, created_at=int(time.time())
    )
