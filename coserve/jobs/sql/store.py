"""Store of files, jobs, events, checkpoints and adapters, in SQL.

Everything happens in transactions: `with store.write() as transaction: …` takes effect whole or not
at all, and survives the end of the process. Every lookup of clients' data takes the tenant. Results
are records, never live rows. Calls block, and may come from any thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.exc import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    SQLAlchemyError,
    TimeoutError,
)
from sqlalchemy.orm import Session

from coserve.errors import DiskFullError, StoreError
from coserve.home import make_private
from coserve.jobs.sql.databases import database_faults, has_tables, open_database
from coserve.jobs.sql.schema import Row, claim, copy_rows, make_tables
from coserve.jobs.sql.tables import SchemaTable, Table
from coserve.jobs.sql.transaction import Transaction
from coserve.settings import without_password

DATABASE_FILE = "coserve.db"
# Error codes of a full disk: SQLite's (the second: no room for the index of its log), PostgreSQL's.
_FULL = ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE", "53100")


class Store:
    """A database of records."""

    def __init__(self, url: str) -> None:
        """Open a database, and create its tables if it is new.

        Args:
            url: URL in SQLAlchemy's form, such as "sqlite:////home/me/.coserve/coserve.db" or
                "postgresql://me@host/coserve".

        Raises:
            StoreError: It cannot be opened, or a newer coserve has written it.
            DiskFullError: There is no room on the disk.
        """
        try:
            self._reading, self._writing = open_database(url)
            make_tables(self._reading, self._writing)
        except (SQLAlchemyError, ImportError) as error:
            raise _unopened(url, error) from None

    @classmethod
    def at(cls, home: Path, url: str | None = None) -> "Store":
        """Open the database of a home: in SQLite in the home, or at a URL, which belongs to this
        home from now on.

        Raises:
            StoreError: It cannot be opened, or belongs to another home.
        """
        if not home.is_dir():
            make_private(home)
        if url is None:
            path = home / DATABASE_FILE
            path.touch(mode=0o600)  # SQLite copies this mode to its other files
            return cls(f"sqlite:///{path}")
        store = cls(url)
        try:
            with _store_errors(), store._writing.begin() as connection:
                claim(connection, home)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections."""
        # Readers and writers share one pool of connections.
        self._reading.dispose()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a transaction for reading, which sees one moment.

        Raises:
            StoreError: The database cannot be read now.
        """
        with _store_errors(), Session(self._reading) as session, session.begin():
            yield Transaction(session)

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Open a transaction whose changes take effect at its end; none does after an error.

        Raises:
            StoreError: The database cannot be written now.
            DiskFullError: There is no room on the disk.
        """
        with _store_errors(), Session(self._writing) as session, session.begin():
            yield Transaction(session)

    def check_room(self) -> None:
        """Write a change that changes nothing.

        Raises:
            StoreError: The database cannot be written now.
            DiskFullError: There is no room on the disk.
        """
        with _store_errors(), self._writing.begin() as connection:
            connection.execute(update(SchemaTable).values(version=SchemaTable.version))

    def copy_to(
        self,
        other: "Store",
        change: Callable[[Row], Row],
        while_still: Callable[[Transaction], None] = lambda transaction: None,
    ) -> None:
        """Copy all rows, as of one moment, to another store, which is empty.

        Args:
            other: Store to copy to.
            change: Changes each row.
            while_still: Called with a transaction that sees the copied moment; writers wait only
                for this call.
        """
        with _store_errors(), self._reading.begin() as source:
            with Session(self._writing) as session, session.begin():
                session.connection()  # takes the writers' lock
                source.execute(select(SchemaTable.version))  # starts its snapshot
                while_still(Transaction(session))
            # Writers continue: the copy reads the snapshot of `source`.
            with other._writing.begin() as target:
                copy_rows(source, target, change)

    def faults(self) -> list[str]:
        """Return descriptions of what is wrong with the database itself."""
        with _store_errors(), self._reading.begin() as connection:
            return database_faults(connection, Table.metadata)


def has_records(url: str) -> bool:
    """Return whether a server has created tables in a database.

    Raises:
        StoreError: It cannot be opened.
    """
    try:
        return has_tables(url)
    except (SQLAlchemyError, ImportError) as error:
        raise _unopened(url, error) from None


def _unopened(url: str, error: Exception) -> StoreError | DiskFullError:
    if _is_full(error):
        return DiskFullError(
            f"the disk is full: the database {without_password(url)} cannot be opened"
        )
    shown = " ".join(str(error).split())
    if getattr(error, "name", None) == "psycopg":
        shown += "; PostgreSQL needs pip install 'coserve[postgresql]'"
    return StoreError(f"the database {without_password(url)} cannot be opened: {shown}")


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except IntegrityError:  # a bug
        raise
    except (DatabaseError, InterfaceError, TimeoutError) as error:
        if _is_full(error):
            raise DiskFullError(
                "the disk of the database is full, and nothing was changed: free some space there, "
                "and try again"
            ) from error
        reason = getattr(error, "orig", None) or error
        raise StoreError(
            f"the database cannot be used now: {' '.join(str(reason).split())}"
        ) from error


def _is_full(error: Exception) -> bool:
    """Return whether an error of SQLAlchemy's means that the database's disk is full."""
    reason = getattr(error, "orig", None)
    return (
        getattr(reason, "sqlite_errorname", None) in _FULL
        or getattr(reason, "sqlstate", None) in _FULL
    )
