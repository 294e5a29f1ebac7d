"""`coserve restore`: restores a home from a backup."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.at_rest import Database
from coserve.cli.connection import Json
from coserve.errors import CoserveError


def restore(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Archive that coserve backup has written.")
    ],
    home: Annotated[
        str,
        typer.Option(
            "--home", metavar="DIR", help="Directory to restore to; it must be new or empty."
        ),
    ],
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Restore a home from a backup; jobs resume when a server starts there.

    The archive is checked first.
    """
    from coserve.home import home_directory, private_files
    from coserve.jobs.maintenance.restore import restore_backup
    from coserve.jobs.sql.databases import database_url
    from coserve.server.lifecycle.home_lock import LOCK_FILE, lock_home

    directory = home_directory(home)
    if not file.is_file():
        raise CoserveError(f"there is no file {file}")
    if directory.exists() and (
        not directory.is_dir() or any(path.name != LOCK_FILE for path in directory.iterdir())
    ):
        raise CoserveError(f"{directory} is not empty: restore into a new directory")
    with private_files(), lock_home(directory):
        restored = restore_backup(file, directory, database_url(database))
    for path in restored.missing:
        print(f"missing: {path} was missing when the backup was made")
    print(
        json.dumps(asdict(restored))
        if as_json
        else f"{restored.home}: {restored.num_files} files and {restored.num_jobs} jobs are there"
    )
