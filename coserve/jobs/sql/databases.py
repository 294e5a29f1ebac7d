"""Kinds of databases, set up so that transactions mean the same in all of them.

There is one writer at a time, who sees all that was written before; readers see one moment, and
block nobody. SQLite and PostgreSQL are tested.
"""

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, MetaData, create_engine, event, inspect, make_url

from coserve.secret_variables import DATABASE

# Longest time that another writer (a backup, say) may hold the database.
_BUSY_S = 30
# Longest times without an answer of PostgreSQL: a server that is away is an error.
_CONNECT_S = 10
_SILENT_S = 30
# Connections that stay open, and additional ones when all are busy; beyond these, calls wait.
_POOL_SIZE, _POOL_OVERFLOW = 5, 10
# Number of PostgreSQL's advisory lock for writers.
_WRITER = int.from_bytes(b"coserve", "big")


def database_url(url: str | None = None) -> str | None:
    """Return the URL that was given, or else that of the environment; None: SQLite in the home."""
    return url or os.environ.get(DATABASE) or None


def open_database(url: str) -> tuple[Engine, Engine]:
    """Open a database twice: for reading, and for writing.

    Raises:
        SQLAlchemyError: It cannot be opened.
        ImportError: Its driver is not installed.
    """
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "postgresql":
        return _open_postgresql(parsed)
    engine = create_engine(parsed, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine)
    return engine, engine.execution_options(coserve_writes=True)


def has_tables(url: str) -> bool:
    """Return whether a database has tables, without creating anything.

    Raises:
        SQLAlchemyError: It cannot be opened.
        ImportError: Its driver is not installed.
    """
    parsed = make_url(url)
    path = parsed.database or ""
    # Connecting would create SQLite's file.
    if (
        parsed.get_backend_name() == "sqlite"
        and not path.startswith("file:")
        and not Path(path).is_file()
    ):
        return False
    engine, _ = open_database(url)
    try:
        return bool(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def database_faults(connection: Connection, metadata: MetaData) -> list[str]:
    """Return descriptions of damage (SQLite reports it), and of missing tables and columns."""
    faults = []
    if connection.dialect.name == "sqlite":
        lines = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check")]
        if lines != ["ok"]:
            return [f"it is damaged: {' '.join(line.split())}" for line in lines]
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            faults.append(
                f"row {row} of {table} belongs to something in {parent} that is not there"
            )
    known = inspect(connection)
    for name, table in metadata.tables.items():
        there = (
            {column["name"] for column in known.get_columns(name)}
            if known.has_table(name)
            else set()
        )
        if missing := sorted({column.name for column in table.columns} - there):
            faults.append(f"the table {name} lacks {', '.join(missing)}")
    return faults


def _set_up_sqlite(engine: Engine) -> None:
    """Set up readers beside a writer (WAL), waiting for locks, foreign keys, and explicit
    transactions.

    A writer takes its lock when its transaction begins, so that it never finds out later that
    another one was faster.
    """

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: Any) -> None:
        # The driver begins no transactions of its own: `on_begin` does.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={_BUSY_S * 1000}")
        _use_wal(connection)
        # With WAL, only FULL makes a commit survive a power failure; foreign keys default to off.
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Turn on WAL, and retry while the database is busy.

    While others write a database that has no WAL yet, SQLite refuses at once to make one, whatever
    busy_timeout is: https://sqlite.org/c3ref/busy_handler.html.
    """
    until_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > until_s:
                raise
        time.sleep(0.01)


def _open_postgresql(url: URL) -> tuple[Engine, Engine]:
    """Open a PostgreSQL database.

    A writer first takes a lock that all writers share, and each of its statements sees what is
    committed: so what it has read holds until it has written, and row numbers grow in the order in
    which rows become visible.
    """
    defaults = {
        "application_name": "coserve",
        "connect_timeout": _CONNECT_S,
        "keepalives_idle": _SILENT_S,
        "tcp_user_timeout": 1000 * _SILENT_S,
    }
    engine = create_engine(
        url,
        connect_args={name: value for name, value in defaults.items() if name not in url.query},
        pool_pre_ping=True,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        pool_timeout=_BUSY_S,
    )

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: Any) -> None:
        connection.execute(f"SET lock_timeout = {1000 * _BUSY_S}")
        # The pool rolls back returned connections, which would undo the setting.
        connection.commit()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Any) -> None:
        if _writes(connection):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER})")

    reading = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return reading, engine.execution_options(isolation_level="READ COMMITTED", coserve_writes=True)


def _writes(connection: Any) -> bool:
    return bool(connection.get_execution_options().get("coserve_writes"))
