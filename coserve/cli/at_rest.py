"""Access of commands to a server's home while no server uses it: `--home` and `--database`, as
`coserve up` has them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coserve.errors import CoserveError
from coserve.home import home_directory
from coserve.secret_variables import take_database

if TYPE_CHECKING:
    from coserve.jobs.sql.store import Store

Home = Annotated[
    str | None,
    typer.Option(
        "--home",
        metavar="DIR",
        show_default="$COSERVE_HOME or ~/.coserve",
        help="Directory of the server's files, jobs and adapters.",
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        show_default="$COSERVE_DATABASE or SQLite in --home",
        help="SQLAlchemy URL of the server's database.",
        callback=take_database,
    ),
]


def existing_home(given: str | None, database: str | None) -> Path:
    """Return the home of a server that has run there, as its database shows.

    Commands on a home create no database: a backup of a new one would be empty.

    Raises:
        CoserveError: There is no such home, or no server has used it.
    """
    from coserve.jobs.sql.store import DATABASE_FILE, has_records
    from coserve.settings import without_password

    directory = home_directory(given)
    if not directory.is_dir():
        raise CoserveError(f"there is no home at {directory}: set --home")
    if database is None and not (directory / DATABASE_FILE).is_file():
        raise CoserveError(
            f"{directory} has no {DATABASE_FILE}: no server has used this home, or its records are "
            "in another database; set --database"
        )
    if database is not None and not has_records(database):
        raise CoserveError(
            f"the database {without_password(database)} has no records: no server has used it; "
            "set --database to the one of this home's server"
        )
    return directory


@contextmanager
def store_at_rest(home: str | None, database: str | None) -> Iterator[tuple[Path, "Store"]]:
    """Yield a home and its records, with the home locked against servers.

    Raises:
        CoserveError: There is no such home, or a server uses it.
        StoreError: Its database cannot be opened.
    """
    from coserve.home import private_files
    from coserve.jobs.sql.databases import database_url
    from coserve.jobs.sql.store import Store
    from coserve.server.lifecycle.home_lock import lock_home

    url = database_url(database)
    directory = existing_home(home, url)
    with private_files(), lock_home(directory, close=False):
        store = Store.at(directory, url)
        try:
            yield directory, store
        finally:
            store.close()
