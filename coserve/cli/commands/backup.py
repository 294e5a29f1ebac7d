"""`coserve backup`: archives a home in one file, even while its server runs."""

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
    """Save a home (records, files, and all that jobs need to resume) in a tar archive.

    The archive shows the home at one moment; its server may keep running. `coserve restore`
    restores it.
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
            archive = write_backup(directory, store, file)
        finally:
            store.close()
    for path in archive.missing:
        print(
            f"missing: {directory / path}, which is on record (see coserve doctor)",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(to_data(archive)))
    else:
        print(
            f"{archive.file}: {archive.num_bytes:,} bytes with {archive.num_files} files, "
            f"{archive.num_jobs} jobs and {archive.num_checkpoints} checkpoints"
        )
