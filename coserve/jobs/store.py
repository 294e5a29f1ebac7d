"""The store: what is known of files, jobs, events, checkpoints and adapters, in SQL.

All that goes through it is a transaction: `with store.write() as transaction: …` happens whole or not at all, and
survives the process however that ends. Every question takes the tenant who asks. Records come out, never live rows.
Calls block; from any thread.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, Select, create_engine, delete, event, func, inspect, select, update
from sqlalchemy.exc import DatabaseError, IntegrityError, InterfaceError, SQLAlchemyError, TimeoutError
from sqlalchemy.orm import Session

from coserve.errors import JobError, StoreError
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
    EventTable,
    FileTable,
    JobTable,
    SchemaTable,
    Table,
)

SCHEMA_VERSION = 1
# How long another process (a backup, say) may hold the database.
_BUSY_S = 30
_Record = TypeVar("_Record")
_RENAMED = {"metadata": "labels"}


def _anything(row: Any) -> bool:
    return True


class Store:
    """One database."""

    def __init__(self, url: str) -> None:
        """Open it, and make its tables if it is new.

        Args:
            url: in SQLAlchemy's form, such as "sqlite:////home/me/.coserve/coserve.db".

        Raises:
            StoreError: it cannot be opened, or a newer coserve has written it.
        """
        try:
            self._engine = create_engine(url, pool_pre_ping=True)
            if self._engine.dialect.name == "sqlite":
                _set_up_sqlite(self._engine)
            self._writing = self._engine.execution_options(coserve_writes=True)
            self._make_tables()
        except (SQLAlchemyError, ImportError) as error:
            shown = " ".join(str(error).split())
            raise StoreError(f"the database {_without_password(url)} cannot be opened: {shown}") from None

    @classmethod
    def at(cls, home: Path) -> "Store":
        """The one below a home directory, in SQLite."""
        home.mkdir(parents=True, exist_ok=True)
        return cls(f"sqlite:///{home / 'coserve.db'}")

    def close(self) -> None:
        """Give its connections back."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator["Transaction"]:
        """Questions that see one moment; StoreError if the database cannot be read now."""
        with _store_errors(), Session(self._engine) as session, session.begin():
            yield Transaction(session)

    @contextmanager
    def write(self) -> Iterator["Transaction"]:
        """Changes that all happen at the end, or, on an error, none; StoreError if it cannot be written now."""
        with _store_errors(), Session(self._writing) as session, session.begin():
            yield Transaction(session)

    def _make_tables(self) -> None:
        known = inspect(self._engine).has_table(SchemaTable.__tablename__)
        if known:
            with Session(self._engine) as session:
                version = session.scalar(select(func.max(SchemaTable.version))) or 0
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"the database is of schema {version}, which a newer coserve has written; this one knows "
                    f"{SCHEMA_VERSION}: update coserve, or give another COSERVE_HOME"
                )
        with self._writing.begin() as connection:
            Table.metadata.create_all(connection)
            if connection.scalar(select(func.count()).select_from(SchemaTable)) == 0:
                connection.execute(SchemaTable.__table__.insert(), {"version": SCHEMA_VERSION})  # type: ignore[attr-defined]


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

    def unfinished_jobs(self) -> tuple[JobRecord, ...]:
        """Of every tenant, the oldest first."""
        return self._all(JobRecord, select(JobTable).where(JobTable.status.not_in(OVER)).order_by(JobTable.seq))

    def job_ids(self) -> set[str]:
        """Of every tenant; for tidying up."""
        return set(self._session.scalars(select(JobTable.id)))

    def change_job(self, id: str, **values: Any) -> JobRecord:
        """Set fields; returns the job as it is now."""
        self._execute(update(JobTable).where(JobTable.id == id).values(**values))
        record = self.any_job(id)
        assert record is not None
        return record

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

    def remove_adapter(self, tenant: str, name: str) -> bool:
        """Returns whether it was there."""
        return self._execute(delete(AdapterTable).where(AdapterTable.tenant == tenant, AdapterTable.name == name)) > 0

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


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except IntegrityError:  # a bug
        raise
    except (DatabaseError, InterfaceError, TimeoutError) as error:
        reason = getattr(error, "orig", None) or error
        raise StoreError(f"the database cannot be used now: {' '.join(str(reason).split())}") from error


def _stored(kind: Any) -> dict[str, str]:
    """Field of a record -> column."""
    names = [each.name for each in fields(kind) if each.metadata.get("stored", True)]
    return {name: _RENAMED.get(name, name) for name in names}


def _record(kind: type[_Record], row: Any) -> _Record:
    return kind(**{name: getattr(row, column) for name, column in _stored(kind).items()})


def _without_password(url: str) -> str:
    return re.sub(r"://([^:@/]*):[^@/]*@", r"://\1:***@", url)


def _row(table: type[Any], record: Any) -> Any:
    return table(**{column: getattr(record, name) for name, column in _stored(record).items()})


def _set_up_sqlite(engine: Engine) -> None:
    """Readers beside a writer (WAL), waiting for locks, foreign keys; and transactions that begin where they say so:
    a writer takes its lock at once, so that it never finds later that another one was faster.
    """

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        for pragma in (f"busy_timeout={_BUSY_S * 1000}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Any) -> None:
        writes = connection.get_execution_options().get("coserve_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
