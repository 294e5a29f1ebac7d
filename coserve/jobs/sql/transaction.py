"""Queries and changes of the store within one transaction, record by record."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Select, delete, func, or_, select, update

from coserve.jobs.deaths import Deaths
from coserve.jobs.records import (
    IS_BEST,
    OVER,
    AdapterRecord,
    CheckpointRecord,
    EventRecord,
    FileRecord,
    JobRecord,
    Page,
)
from coserve.jobs.sql.batch_queries import PART_PURPOSE, BatchQueries
from coserve.jobs.sql.conversation_queries import ConversationQueries
from coserve.jobs.sql.queries import Record, anything, record_of, row_of
from coserve.jobs.sql.response_queries import ResponseQueries
from coserve.jobs.sql.tables import (
    AdapterTable,
    CheckpointTable,
    DeathsTable,
    EventTable,
    FileTable,
    JobTable,
    LoadedAdapterTable,
)


class Transaction(ResponseQueries, ConversationQueries, BatchQueries):
    """Queries and changes within one transaction."""

    # -- files ----------------------------------------------------------------------

    def add_file(self, record: FileRecord) -> None:
        self._session.add(row_of(FileTable, record))

    def file(self, tenant: str, id: str) -> FileRecord | None:
        """Return a tenant's file; None if there is none, or it has expired."""
        return self._one(FileRecord, self._files(tenant).where(FileTable.id == id))

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Page:
        query = self._files(tenant)
        if purpose is not None:
            query = query.where(FileTable.purpose == purpose)
        return self._page(FileRecord, FileTable, tenant, query, after, limit, newest_first)

    def remove_file(self, tenant: str, id: str) -> bool:
        """Remove a file; return whether it existed."""
        return (
            self._execute(delete(FileTable).where(FileTable.tenant == tenant, FileTable.id == id))
            > 0
        )

    def remove_expired_files(self) -> list[str]:
        """Remove expired files, and return their ids."""
        expired = FileTable.expires_at <= int(time.time())
        ids = list(self._session.scalars(select(FileTable.id).where(expired)))
        self._execute(delete(FileTable).where(expired))
        return ids

    def file_bytes(self, tenant: str) -> int:
        """Return the size of all files of a tenant."""
        query = select(func.coalesce(func.sum(FileTable.num_bytes), 0)).where(
            FileTable.tenant == tenant
        )
        return int(self._session.scalar(query) or 0)

    def file_ids(self) -> set[str]:
        """Return the ids of every tenant's files."""
        return set(self._session.scalars(select(FileTable.id)))

    def _files(self, tenant: str) -> Select[Any]:
        alive = FileTable.expires_at.is_(None) | (FileTable.expires_at > int(time.time()))
        # Parts of unfinished uploads are files that clients do not see.
        return select(FileTable).where(
            FileTable.tenant == tenant, FileTable.purpose != PART_PURPOSE, alive
        )

    # -- jobs -----------------------------------------------------------------------

    def add_job(self, record: JobRecord) -> None:
        self._session.add(row_of(JobTable, record))
        self._session.flush()  # its events refer to it

    def job(self, tenant: str, id: str) -> JobRecord | None:
        return self._one(
            JobRecord, select(JobTable).where(JobTable.tenant == tenant, JobTable.id == id)
        )

    def jobs(
        self,
        tenant: str,
        *,
        after: str | None,
        limit: int,
        metadata: dict[str, str] | None = None,
        bare: bool = False,
    ) -> Page:
        """Return a page of a tenant's jobs, the newest first.

        Args:
            tenant: Owner of the jobs.
            after: Id of the job after which the page begins.
            limit: Maximum number of jobs.
            metadata: Select only jobs with these entries.
            bare: Select only jobs without metadata.
        """
        query = select(JobTable).where(JobTable.tenant == tenant)
        if bare:
            query = query.where(JobTable.labels.is_(None))

        def has_metadata(row: JobTable) -> bool:
            return (metadata or {}).items() <= (row.labels or {}).items()

        return self._page(
            JobRecord,
            JobTable,
            tenant,
            query,
            after,
            limit,
            True,
            has_metadata if metadata else anything,
        )

    def any_job(self, id: str) -> JobRecord | None:
        """Return a job of any tenant."""
        return self._one(JobRecord, select(JobTable).where(JobTable.id == id))

    def newest_job(self) -> JobRecord | None:
        """Return the newest job of all tenants."""
        return self._one(JobRecord, select(JobTable).order_by(JobTable.seq.desc()).limit(1))

    def unfinished_jobs(self) -> tuple[JobRecord, ...]:
        """Return the unfinished jobs of every tenant, the oldest first."""
        return self._all(
            JobRecord, select(JobTable).where(JobTable.status.not_in(OVER)).order_by(JobTable.seq)
        )

    def num_unfinished_jobs(self, tenant: str) -> int:
        query = select(func.count()).where(JobTable.tenant == tenant, JobTable.status.not_in(OVER))
        return int(self._session.scalar(query) or 0)

    def job_ids(self) -> set[str]:
        """Return the ids of every tenant's jobs."""
        return set(self._session.scalars(select(JobTable.id)))

    def change_job(self, id: str, **values: Any) -> JobRecord:
        """Set fields of a job, and return its new record."""
        self._execute(update(JobTable).where(JobTable.id == id).values(**values))
        record = self.any_job(id)
        assert record is not None
        return record

    def deaths(self) -> dict[str, Deaths]:
        """Return the suspected engine deaths of every tenant's jobs, by job."""
        return {
            row.job: record_of(Deaths, row) for row in self._session.scalars(select(DeathsTable))
        }

    def put_deaths(self, deaths: Mapping[str, Deaths]) -> None:
        """Replace all suspected engine deaths."""
        self._execute(delete(DeathsTable))
        self._session.add_all(
            DeathsTable(job=job, num=each.num, step=each.step) for job, each in deaths.items()
        )

    def forget_deaths(self, job: str) -> None:
        """Remove the suspected engine deaths of a job, if there are any."""
        self._execute(delete(DeathsTable).where(DeathsTable.job == job))

    # -- events ---------------------------------------------------------------------

    def add_event(self, record: EventRecord) -> bool:
        """Add an event, unless it is of metrics that are on record already; return whether it was
        added.
        """
        # A report may be written again after a commit that only seemed to fail.
        if record.step is not None and self._session.scalar(
            select(func.count())
            .select_from(EventTable)
            .where(
                EventTable.job == record.job,
                EventTable.step == record.step,
                EventTable.kind == record.kind,
            )
        ):
            return False
        self._session.add(row_of(EventTable, record))
        self._session.flush()
        return True

    def events(self, tenant: str, job: str, *, after: str | None, limit: int) -> Page:
        """Return a page of a job's events, the newest first."""
        query = select(EventTable).where(EventTable.tenant == tenant, EventTable.job == job)
        return self._page(EventRecord, EventTable, tenant, query, after, limit, True)

    def metrics(
        self, job: str, *, step: int | None = None, every: int = 1
    ) -> tuple[EventRecord, ...]:
        """Return a job's metrics events, by step.

        Args:
            job: Id of the job.
            step: Select only this step.
            every: Select only steps that are multiples of this, and all evaluations.
        """
        query = select(EventTable).where(EventTable.job == job, EventTable.step.is_not(None))
        if step is not None:
            query = query.where(EventTable.step == step)
        if every > 1:
            query = query.where(or_(EventTable.step % every == 0, EventTable.kind == "evaluation"))
        return self._all(EventRecord, query.order_by(EventTable.step, EventTable.seq))

    def last_losses(self, jobs: Collection[str]) -> dict[str, float | None]:
        """Return the training loss of the last optimizer step of each of these jobs that has made
        one.
        """
        is_step = (EventTable.kind == "step", EventTable.job.in_(jobs))
        newest = select(EventTable.job, func.max(EventTable.step).label("step")).where(*is_step)
        # The newest step of each job, joined with the event itself.
        last = newest.group_by(EventTable.job).subquery()
        same = (EventTable.job == last.c.job) & (EventTable.step == last.c.step)
        rows = self._session.scalars(
            select(EventTable).join(last, same).where(EventTable.kind == "step")
        )
        return {row.job: row.data.get("train_loss") for row in rows}

    def best_evaluations(self, jobs: Collection[str]) -> dict[str, EventRecord]:
        """Return the best evaluation of each of these jobs that has been evaluated."""
        query = select(EventTable).where(EventTable.kind == "evaluation", EventTable.job.in_(jobs))
        events = self._all(EventRecord, query.order_by(EventTable.step, EventTable.seq))
        # In the order of steps: the last one that was the best so far is the best of all.
        return {event.job: event for event in events if event.data.get(IS_BEST)}

    # -- checkpoints ----------------------------------------------------------------

    def put_checkpoint(self, record: CheckpointRecord) -> CheckpointRecord:
        """Add a checkpoint, or replace the directory of the one of this step, which keeps its id
        and stays listed if it was.
        """
        where = (CheckpointTable.job == record.job, CheckpointTable.step == record.step)
        row = self._session.scalar(select(CheckpointTable).where(*where))
        if row is None:
            self._session.add(row := row_of(CheckpointTable, record))
        else:
            row.directory, row.listed = record.directory, row.listed or record.listed
        self._session.flush()
        return record_of(CheckpointRecord, row)

    def checkpoints(self, tenant: str, job: str, *, after: str | None, limit: int) -> Page:
        """Return a page of a job's listed checkpoints, the newest first."""
        query = select(CheckpointTable).where(
            CheckpointTable.tenant == tenant,
            CheckpointTable.job == job,
            CheckpointTable.listed.is_(True),
        )
        return self._page(CheckpointRecord, CheckpointTable, tenant, query, after, limit, True)

    def all_checkpoints(self, job: str) -> tuple[CheckpointRecord, ...]:
        """Return all checkpoints of a job, listed or not, by step."""
        query = select(CheckpointTable).where(CheckpointTable.job == job)
        return self._all(CheckpointRecord, query.order_by(CheckpointTable.step))

    def remove_checkpoint(self, job: str, step: int) -> None:
        self._execute(
            delete(CheckpointTable).where(CheckpointTable.job == job, CheckpointTable.step == step)
        )

    def remove_checkpoints(self, job: str) -> None:
        """Remove all checkpoints of a job."""
        self._execute(delete(CheckpointTable).where(CheckpointTable.job == job))

    def remove_checkpoint_of_name(self, job: str, name: str) -> None:
        self._execute(
            delete(CheckpointTable).where(CheckpointTable.job == job, CheckpointTable.name == name)
        )

    def roll_back(self, job: str, step: int) -> JobRecord:
        """Remove what a job did after a step, which it will repeat; return its new record."""
        self._execute(delete(EventTable).where(EventTable.job == job, EventTable.step > step))
        late = (CheckpointTable.job == job, CheckpointTable.step > step)
        # The adapter of a checkpoint has the checkpoint's name.
        names = list(self._session.scalars(select(CheckpointTable.name).where(*late)))
        self._execute(
            delete(AdapterTable).where(AdapterTable.job == job, AdapterTable.name.in_(names))
        )
        self._execute(delete(CheckpointTable).where(*late))
        return self.change_job(job, num_steps_done=step)

    # -- adapters -------------------------------------------------------------------

    def put_adapter(self, record: AdapterRecord) -> None:
        """Add an adapter, or replace the one of this name."""
        self.remove_adapter(record.tenant, record.name)
        self._session.add(row_of(AdapterTable, record))

    def adapter(self, tenant: str, name: str) -> AdapterRecord | None:
        query = select(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.name == name)
        return self._one(AdapterRecord, query)

    def adapters(self, tenant: str, base: str) -> tuple[AdapterRecord, ...]:
        """Return a tenant's adapters of a model, the oldest first."""
        query = select(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.base == base)
        return self._all(AdapterRecord, query.order_by(AdapterTable.seq))

    def adapters_in(self, directory: str) -> tuple[AdapterRecord, ...]:
        """Return all adapters in a directory."""
        return self._all(
            AdapterRecord, select(AdapterTable).where(AdapterTable.directory == directory)
        )

    def adapters_of(self, job: str) -> tuple[AdapterRecord, ...]:
        """Return all adapters that a job has made: its model and its checkpoints."""
        return self._all(AdapterRecord, select(AdapterTable).where(AdapterTable.job == job))

    def adapter_directories(self) -> set[str]:
        """Return the directories of every tenant's adapters and checkpoints."""
        directories = set[str]()
        for table in (AdapterTable, CheckpointTable):
            directories.update(filter(None, self._session.scalars(select(table.directory))))
        return directories

    def remove_adapter(self, tenant: str, name: str) -> bool:
        """Remove an adapter; return whether it existed."""
        return (
            self._execute(
                delete(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.name == name)
            )
            > 0
        )

    # -- everything -------------------------------------------------------------------

    def all_of(self, kind: type[Record]) -> tuple[Record, ...]:
        """Return every tenant's records of a kind, the oldest first; of adapters, those that jobs
        have made.
        """
        tables = {JobRecord: JobTable, FileRecord: FileTable, CheckpointRecord: CheckpointTable}
        table: Any = tables.get(kind, AdapterTable)
        return self._all(kind, select(table).order_by(table.seq))

    def all_loaded_adapters(self) -> tuple[AdapterRecord, ...]:
        """Return every tenant's loaded adapters, the oldest first."""
        return self._all(AdapterRecord, select(LoadedAdapterTable).order_by(LoadedAdapterTable.seq))

    # -- adapters that clients have loaded ---------------------------------------------

    def put_loaded_adapter(self, record: AdapterRecord) -> None:
        """Add a loaded adapter, or replace the one of this name."""
        self.remove_loaded_adapter(record.tenant, record.name)
        self._session.add(row_of(LoadedAdapterTable, record))

    def loaded_adapters(self, base: str) -> tuple[AdapterRecord, ...]:
        """Return every tenant's loaded adapters of a model, the oldest first."""
        query = select(LoadedAdapterTable).where(LoadedAdapterTable.base == base)
        return self._all(AdapterRecord, query.order_by(LoadedAdapterTable.seq))

    def remove_loaded_adapter(self, tenant: str, name: str) -> None:
        """Remove a loaded adapter, if it exists."""
        where = (LoadedAdapterTable.tenant == tenant, LoadedAdapterTable.name == name)
        self._execute(delete(LoadedAdapterTable).where(*where))
