"""All rows of one database into another, of whatever kind: for backups, and from SQLite to
PostgreSQL and back.
"""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, func, insert, select, text

from coserve.jobs.sql.tables import HomeTable, SchemaTable, Table

Row = dict[str, Any]

_ROWS_AT_ONCE = 1000
# They are each database's own.
_NOT_COPIED = {HomeTable.__tablename__, SchemaTable.__tablename__}


def copy_rows(source: Connection, target: Connection, change: Callable[[Row], Row]) -> None:
    """As `source` sees them at this moment, each as `change` makes it; the tables of `target` are
    there, and empty.
    """
    for table in Table.metadata.sorted_tables:
        if table.name in _NOT_COPIED:
            continue
        query = select(table).order_by(table.c.seq).execution_options(yield_per=_ROWS_AT_ONCE)
        for rows in source.execute(query).mappings().partitions():
            target.execute(insert(table), [change(dict(row)) for row in rows])
        if target.dialect.name == "postgresql":  # or the next row would get a number that is taken
            newest = target.scalar(select(func.max(table.c.seq)))
            if newest is not None:
                target.execute(
                    text("SELECT setval(pg_get_serial_sequence(:name, 'seq'), :newest)"),
                    {"name": table.name, "newest": newest},
                )
