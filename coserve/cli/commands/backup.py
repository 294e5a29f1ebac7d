"""`coserve backup`: a home in one file, also while its server runs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.at_rest import Database, Home, existing_home
from coserve.cli.connection import Json


def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Archive to write, such as home.tar.")
    ],
    home: Home = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Save a home in a tar archive: records, files, and all that jobs need to resume. Its server
    may run meanwhile.

    It is all as of one moment, whatever the server does in the meantime. `coserve restore` makes a
    home of it again.
    """
    from coserve.home import private_files
    from coserve.jobs.maintenance.backup import to_data, write_backup
    from coserve.jobs.sql.databases import database_url
    from coserve.jobs.sql.store import Store

    url = database_url(database)
    directory = existing_home(home, url)
    with private_files():
        store = Store.at(directory, url)
        try:
            made = write_backup(directory, store, file)
        finally:
            store.close()
    for path in made.missing:
        print(
            f"missing: {directory / path} is on record, and is not there (coserve doctor says "
            f"more)",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(to_data(made)))
    else:
        print(
            f"{made.file}: {made.num_bytes:,} bytes with {made.num_files} files, {made.num_jobs} "
            f"jobs and "
            f"{made.num_checkpoints} checkpoints"
        )
