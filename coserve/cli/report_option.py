"""The option for the place of a report, which is checked before anything runs and written at the
end.
"""

import os
from pathlib import Path
from tempfile import TemporaryFile

import typer

from coserve.errors import CoserveError


def report_option(path: Path) -> Path:
    """Return the path, after a check that it can be written."""
    if (reason := _reason(path)) is not None:
        raise typer.BadParameter(
            f"{path} cannot be written ({reason}): choose a file in a writable directory"
        )
    return path


def report_directory_option(path: Path) -> Path:
    """Return the path of a directory, after a check that it can be created or written."""
    try:
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        with TemporaryFile(dir=there):
            return path
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written ({error.strerror}): choose a writable directory"
        ) from None


def write_report(path: Path, page: str) -> None:
    """Write a report.

    Raises:
        CoserveError: It cannot be written any more; the results have been printed.
    """
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise CoserveError(
            f"the report cannot be written to {path} ({error.strerror}); the results are above"
        ) from None


def _reason(path: Path) -> str | None:
    """Return why a file cannot be written, if so; the check leaves nothing behind."""
    try:
        if path.is_dir():
            return "it is a directory"
        if path.exists():
            return None if os.access(path, os.W_OK) else "it is write-protected"
        with TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return error.strerror
