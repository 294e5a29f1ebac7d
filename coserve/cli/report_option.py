"""The option that says where a report goes: looked at before anything runs, written once the
results have been told.
"""

import os
from pathlib import Path
from tempfile import TemporaryFile

import typer

from coserve.errors import CoserveError


def report_option(path: Path) -> Path:
    """As it was given; one that cannot be written is said before anything is measured."""
    if (reason := _reason(path)) is not None:
        raise typer.BadParameter(
            f"{path} cannot be written ({reason}): name a file in a directory that you may write to"
        )
    return path


def report_directory_option(path: Path) -> Path:
    """The same for a directory, which is made later, with those that it lies in."""
    try:
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        with TemporaryFile(dir=there):
            return path
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written ({error.strerror}): name a directory that you may write to"
        ) from None


def write_report(path: Path, page: str) -> None:
    """CoserveError: that cannot be done any more; the results have been printed by then."""
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise CoserveError(
            f"the report cannot be written to {path} ({error.strerror}); the results stand above"
        ) from None


def _reason(path: Path) -> str | None:
    """Why a file cannot be written, if so; nothing is left of the try."""
    try:
        if path.is_dir():
            return "it is a directory"
        if path.exists():
            return None if os.access(path, os.W_OK) else "it is write-protected"
        with TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return error.strerror
