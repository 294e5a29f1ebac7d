"""What is asked and changed of the store within one transaction, record by record."""

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.orm import Session

from coserve.errors import JobError
from coserve.jobs.deaths import Deaths
from coserve.jobs.records import (
    OVER,
    AdapterRecord,
    CheckpointRecord,
    EventRecord,
    FileRecord,
    JobRecord,
    Page,
)
from coserve.jobs.tables import (
    AdapterTable,
    CheckpointTable,
    DeathsTable,
    EventTable,
    FileTable,
    JobTable,
    LoadedAdapterTable,
)

_Record = TypeVar("_Record")
_RENAMED = {"metadata": "labels"}


def _anything(row: Any) -> bool:
    return True


class Transaction:
    """Questions and changes, within one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # -- files ----------------------------------------------------------------------

    def add_file(self, record: FileRecord) -> None:
        self._session.add(_row(FileTable, record))

    def file(self, tenant: str, id: str) -> FileRecord | None:
        """None if it is not there, another's, or past its time."""
        return self._one(FileRecord, self._files(tenant).where(FileTable.id == id))

    def files(self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool) -> Page:
        query = self._files(tenant)
        if purpose is not None:
            query = query.where(FileTable.purpose == purpose)
        return self._page(FileRecord, FileTable, tenant, query, after, limit, newest_first)

    def remove_file(self, tenant: str, id: str) -> bool:
        """Returns whether it was there."""
        return self._execute(delete(FileTable).where(FileTable.tenant == tenant, FileTable.id == id)) > 0

    def remove_expired_files(self) -> list[str]:
        """Forget files that are past their time; returns their ids."""
        expired = FileTable.expires_at <= int(time.time())
        ids = list(self._session.scalars(select(FileTable.id).where(expired)))
        self._execute(delete(FileTable).where(expired))
        return ids

    def file_bytes(self, tenant: str) -> int:
        """Of all of its files."""
        query = select(func.coalesce(func.sum(FileTable.num_bytes), 0)).where(FileTable.tenant == tenant)
        return int(self._session.scalar(query) or 0)

    def file_ids(self) -> set[str]:
        """Of every tenant; for tidying up."""
        return set(self._session.scalars(select(FileTable.id)))

    def _files(self, tenant: str) -> Select[Any]:
        alive = FileTable.expires_at.is_(None) | (FileTable.expires_at > int(time.time()))
        return select(FileTable).where(FileTable.tenant == tenant, alive)

    # -- jobs -----------------------------------------------------------------------

    def add_job(self, record: JobRecord) -> None:
        self._session.add(_row(JobTable, record))
        self._session.flush()  # its events refer to it

    def job(self, tenant: str, id: str) -> JobRecord | None:
        return self._one(JobRecord, select(JobTable).where(JobTable.tenant == tenant, JobTable.id == id))

    def jobs(
        self, tenant: str, *, after: str | None, limit: int, metadata: dict[str, str] | None = None, bare: bool = False
    ) -> Page:
        """The newest first. metadata: only those with these entries. bare: only those without any."""
        query = select(JobTable).where(JobTable.tenant == tenant)
        if bare:
            query = query.where(JobTable.labels.is_(None))

        def has_metadata(row: JobTable) -> bool:
            return (metadata or {}).items() <= (row.labels or {}).items()

        return self._page(
            JobRecord, JobTable, tenant, query, after, limit, True, has_metadata if metadata else _anything
        )

    def any_job(self, id: str) -> JobRecord | None:
        """A job of whichever tenant: for the manager, who serves all."""
        return self._one(JobRecord, select(JobTable).where(JobTable.id == id))

    def newest_job(self) -> JobRecord | None:
        """Of every tenant."""
        return self._one(JobRecord, select(JobTable).order_by(JobTable.seq.desc()).limit(1))

    def unfinished_jobs(self) -> tuple[JobRecord, ...]:
        """Of every tenant, the oldest first."""
        return self._all(JobRecord, select(JobTable).where(JobTable.status.not_in(OVER)).order_by(JobTable.seq))

    def num_unfinished_jobs(self, tenant: str) -> int:
        query = select(func.count()).where(JobTable.tenant == tenant, JobTable.status.not_in(OVER))
        return int(self._session.scalar(query) or 0)

    def job_ids(self) -> set[str]:
        """Of every tenant; for tidying up."""
        return set(self._session.scalars(select(JobTable.id)))

    def change_job(self, id: str, **values: Any) -> JobRecord:
        """Set fields; returns the job as it is now."""
        self._execute(update(JobTable).where(JobTable.id == id).values(**values))
        record = self.any_job(id)
        assert record is not None
        return record

    def deaths(self) -> dict[str, Deaths]:
        """The jobs of whichever tenant that engines may have died of."""
        return {row.job: _record(Deaths, row) for row in self._session.scalars(select(DeathsTable))}

    def put_deaths(self, deaths: Mapping[str, Deaths]) -> None:
        """All that are to be remembered."""
        self._execute(delete(DeathsTable))
        self._session.add_all(DeathsTable(job=job, num=each.num, step=each.step) for job, each in deaths.items())

    def forget_deaths(self, job: str) -> None:
        """No error if there were none."""
        self._execute(delete(DeathsTable).where(DeathsTable.job == job))

    # -- events ---------------------------------------------------------------------

    def add_event(self, record: EventRecord) -> bool:
        """Metrics that are there already are not added again; returns whether it was added."""
        if record.step is not None and self._session.scalar(
            select(func.count())
            .select_from(EventTable)
            .where(EventTable.job == record.job, EventTable.step == record.step, EventTable.kind == record.kind)
        ):
            return False
        self._session.add(_row(EventTable, record))
        self._session.flush()
        return True

    def events(self, tenant: str, job: str, *, after: str | None, limit: int) -> Page:
        """The newest first."""
        query = select(EventTable).where(EventTable.tenant == tenant, EventTable.job == job)
        return self._page(EventRecord, EventTable, tenant, query, after, limit, True)

    def metrics(self, job: str, *, step: int | None = None) -> tuple[EventRecord, ...]:
        """A job's metrics (of one step), by step."""
        query = select(EventTable).where(EventTable.job == job, EventTable.step.is_not(None))
        if step is not None:
            query = query.where(EventTable.step == step)
        return self._all(EventRecord, query.order_by(EventTable.step, EventTable.seq))

    # -- checkpoints ----------------------------------------------------------------

    def put_checkpoint(self, record: CheckpointRecord) -> CheckpointRecord:
        """Add it, or let it take the place of the one of this step, whose id and promise to be listed stand."""
        where = (CheckpointTable.job == record.job, CheckpointTable.step == record.step)
        row = self._session.scalar(select(CheckpointTable).where(*where))
        if row is None:
            self._session.add(row := _row(CheckpointTable, record))
        else:
            row.directory, row.listed = record.directory, row.listed or record.listed
        self._session.flush()
        return _record(CheckpointRecord, row)

    def checkpoints(self, tenant: str, job: str, *, after: str | None, limit: int) -> Page:
        """Those that are listed, the newest first."""
        query = select(CheckpointTable).where(
            CheckpointTable.tenant == tenant, CheckpointTable.job == job, CheckpointTable.listed.is_(True)
        )
        return self._page(CheckpointRecord, CheckpointTable, tenant, query, after, limit, True)

    def all_checkpoints(self, job: str) -> tuple[CheckpointRecord, ...]:
        """Listed or not, by step."""
        query = select(CheckpointTable).where(CheckpointTable.job == job)
        return self._all(CheckpointRecord, query.order_by(CheckpointTable.step))

    def remove_checkpoint(self, job: str, step: int) -> None:
        self._execute(delete(CheckpointTable).where(CheckpointTable.job == job, CheckpointTable.step == step))

    def remove_checkpoints(self, job: str) -> None:
        """All of a job's."""
        self._execute(delete(CheckpointTable).where(CheckpointTable.job == job))

    def remove_checkpoint_of_name(self, job: str, name: str) -> None:
        self._execute(delete(CheckpointTable).where(CheckpointTable.job == job, CheckpointTable.name == name))

    def roll_back(self, job: str, step: int) -> None:
        """Forget what a job did after a step: it will do it again."""
        self._execute(delete(EventTable).where(EventTable.job == job, EventTable.step > step))
        late = (CheckpointTable.job == job, CheckpointTable.step > step)
        names = list(self._session.scalars(select(CheckpointTable.name).where(*late)))
        self._execute(delete(AdapterTable).where(AdapterTable.job == job, AdapterTable.name.in_(names)))
        self._execute(delete(CheckpointTable).where(*late))
        self._execute(update(JobTable).where(JobTable.id == job).values(num_steps_done=step))

    # -- adapters -------------------------------------------------------------------

    def put_adapter(self, record: AdapterRecord) -> None:
        """Add it, or let it take the place of the one of this name."""
        self.remove_adapter(record.tenant, record.name)
        self._session.add(_row(AdapterTable, record))

    def adapter(self, tenant: str, name: str) -> AdapterRecord | None:
        query = select(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.name == name)
        return self._one(AdapterRecord, query)

    def adapters(self, tenant: str, base: str) -> tuple[AdapterRecord, ...]:
        """Those of a model, the oldest first."""
        query = select(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.base == base)
        return self._all(AdapterRecord, query.order_by(AdapterTable.seq))

    def adapters_in(self, directory: str) -> tuple[AdapterRecord, ...]:
        """All adapters in this directory."""
        return self._all(AdapterRecord, select(AdapterTable).where(AdapterTable.directory == directory))

    def adapters_of(self, job: str) -> tuple[AdapterRecord, ...]:
        """All that a job has made: its model, and its checkpoints."""
        return self._all(AdapterRecord, select(AdapterTable).where(AdapterTable.job == job))

    def adapter_directories(self) -> set[str]:
        """Of every tenant's adapters and checkpoints; for tidying up."""
        return {
            directory
            for table in (AdapterTable, CheckpointTable)
            for directory in self._session.scalars(select(table.directory))
            if directory is not None
        }

    def remove_adapter(self, tenant: str, name: str) -> bool:
        """Returns whether it was there."""
        return self._execute(delete(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.name == name)) > 0

    # -- everything -------------------------------------------------------------------

    def all_of(self, kind: type[_Record]) -> tuple[_Record, ...]:
        """Every tenant's records of a kind, the oldest first; of adapters, those that jobs have made."""
        tables = {JobRecord: JobTable, FileRecord: FileTable, CheckpointRecord: CheckpointTable}
        table: Any = tables.get(kind, AdapterTable)
        return self._all(kind, select(table).order_by(table.seq))

    def all_loaded_adapters(self) -> tuple[AdapterRecord, ...]:
        """Every tenant's, the oldest first."""
        return self._all(AdapterRecord, select(LoadedAdapterTable).order_by(LoadedAdapterTable.seq))

    # -- adapters that clients have loaded ---------------------------------------------

    def put_loaded_adapter(self, record: AdapterRecord) -> None:
        """Add it, or let it take the place of the one of this name."""
        self.remove_loaded_adapter(record.tenant, record.name)
        self._session.add(_row(LoadedAdapterTable, record))

    def loaded_adapters(self, base: str) -> tuple[AdapterRecord, ...]:
        """Every tenant's, on a model, the oldest first."""
        query = select(LoadedAdapterTable).where(LoadedAdapterTable.base == base)
        return self._all(AdapterRecord, query.order_by(LoadedAdapterTable.seq))

    def remove_loaded_adapter(self, tenant: str, name: str) -> None:
        """No error if it is not there."""
        where = (LoadedAdapterTable.tenant == tenant, LoadedAdapterTable.name == name)
        self._execute(delete(LoadedAdapterTable).where(*where))

    # -- shared ---------------------------------------------------------------------

    def _one(self, kind: type[_Record], query: Select[Any]) -> _Record | None:
        row = self._session.scalar(query)
        return None if row is None else _record(kind, row)

    def _all(self, kind: type[_Record], query: Select[Any]) -> tuple[_Record, ...]:
        return tuple(_record(kind, row) for row in self._session.scalars(query))

    def _page(
        self,
        kind: type[Any],
        table: type[Any],
        tenant: str,
        query: Select[Any],
        after: str | None,
        limit: int,
        newest_first: bool,
        is_asked_for: Callable[[Any], bool] = _anything,
    ) -> Page:
        if after is not None:
            seq = self._session.scalar(select(table.seq).where(table.tenant == tenant, table.id == after))
            if seq is None:
                raise JobError(f"after names {after!r}, which is not there", param="after")
            query = query.where(table.seq < seq if newest_first else table.seq > seq)
        query = query.order_by(table.seq.desc() if newest_first else table.seq)
        if is_asked_for is _anything:
            query = query.limit(limit + 1)
        rows = (row for row in self._session.scalars(query) if is_asked_for(row))
        items = [_record(kind, row) for row in islice(rows, limit + 1)]
        return Page(items=tuple(items[:limit]), has_more=len(items) > limit)

    def _execute(self, statement: Any) -> int:
        self._session.flush()
        result: Any = self._session.execute(statement.execution_options(synchronize_session=False))
        self._session.expire_all()
        return int(result.rowcount)


def _stored(kind: Any) -> dict[str, str]:
    """Field of a record -> column."""
    names = [each.name for each in fields(kind) if each.metadata.get("stored", True)]
    return {name: _RENAMED.get(name, name) for name in names}


def _record(kind: type[_Record], row: Any) -> _Record:
    return kind(**{name: getattr(row, column) for name, column in _stored(kind).items()})


def _row(table: type[Any], record: Any) -> Any:
    return table(**{column: getattr(record, name) for name, column in _stored(record).items()})
