"""Schema of a database: its tables, the home that owns it, and copies of all its rows."""

from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any

from sqlalchemy import Connection, Engine, func, insert, inspect, select, text

from coserve.errors import StoreError
from coserve.jobs.records import new_id
from coserve.jobs.sql.tables import HomeTable, SchemaTable, Table

SCHEMA_VERSION = 1
# File of a home with the id by which a database elsewhere recognises it.
_MARK_FILE = "home-id"
_ROWS_AT_ONCE = 1000
# Tables that belong to one database.
_NOT_COPIED = {HomeTable.__tablename__, SchemaTable.__tablename__}

Row = dict[str, Any]


def make_tables(reading: Engine, writing: Engine) -> None:
    """Create missing tables.

    Raises:
        StoreError: A newer coserve has made the tables.
    """
    if inspect(reading).has_table(SchemaTable.__tablename__):
        with reading.connect() as connection:
            version = connection.scalar(select(func.max(SchemaTable.version))) or 0
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"the database is of schema {version}, which a newer coserve has written; this one "
                f"knows "
                f"{SCHEMA_VERSION}: update coserve, or give another COSERVE_HOME"
            )
    with writing.begin() as connection:
        Table.metadata.create_all(connection)
        if connection.scalar(select(func.count()).select_from(SchemaTable)) == 0:
            connection.execute(insert(SchemaTable), {"version": SCHEMA_VERSION})


def claim(connection: Connection, home: Path) -> None:
    """Make a database a home's own.

    Two homes with one database would run the same jobs, and remove each other's files.

    Raises:
        StoreError: The database belongs to another home.
    """
    mark = home / _MARK_FILE
    mine = mark.read_text().strip() if mark.is_file() else None
    owner = connection.execute(select(HomeTable.id, HomeTable.place)).first()
    if owner is None:
        # The mark comes first: a database with an owner but no mark could not be used any more.
        mine = mine or new_id("home-")
        mark.touch(mode=0o600)
        mark.write_text(f"{mine}\n")
        connection.execute(insert(HomeTable), {"id": mine, "place": f"{home} of {gethostname()}"})
    elif owner.id != mine:
        raise StoreError(
            f"the database records files and jobs of another home, {owner.place}: use that one, or "
            f"an empty database "
            f"(if that home was moved here, write {owner.id} to {mark})"
        )


def copy_rows(source: Connection, target: Connection, change: Callable[[Row], Row]) -> None:
    """Copy all rows, as `source` sees them at this moment and changed by `change`, into the empty
    tables of `target`, which may be of another kind.
    """
    for table in Table.metadata.sorted_tables:
        if table.name in _NOT_COPIED:
            continue
        query = select(table).order_by(table.c.seq).execution_options(yield_per=_ROWS_AT_ONCE)
        for rows in source.execute(query).mappings().partitions():
            target.execute(insert(table), [change(dict(row)) for row in rows])
        # Otherwise the next row in PostgreSQL gets a number that is taken.
        if target.dialect.name == "postgresql":
            newest = target.scalar(select(func.max(table.c.seq)))
            if newest is not None:
                target.execute(
                    text("SELECT setval(pg_get_serial_sequence(:name, 'seq'), :newest)"),
                    {"name": table.name, "newest": newest},
                )
