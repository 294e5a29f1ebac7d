"""Storage that a server and its engines share for files, examples and checkpoints.

The base class is a directory that all of them read and write at the same path. Storage at a URL is
`coserve.jobs.files.remote_files`.
"""

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

_log = logging.getLogger(__name__)


class SharedFiles:
    """Shared storage in a local directory. Calls block, and may come from any thread. Paths are
    those of this machine.
    """

    def check(self) -> None:
        """Raise StoreError, in one line, if the storage cannot be used."""

    def keep(self, path: Path) -> None:
        """Publish a file, or a directory of files, that is complete here; others find it when this
        returns.

        Raises:
            StoreError: It cannot be published.
        """

    def keep_checkpoint(self, directory: Path) -> Path:
        """Publish a directory under a name that no other engine uses, and return its path from now
        on.
        """
        return directory

    def fetch(self, path: Path) -> None:
        """Make a published path available here, whole or not at all; a path that does not exist is
        no error.

        Raises:
            StoreError: It cannot be fetched now.
            DiskFullError: There is no room for it.
        """

    def is_file(self, path: Path) -> bool:
        """Return whether others find a file.

        Raises:
            StoreError: The storage cannot be read now.
        """
        return path.is_file()

    def entries(self, directory: Path) -> list[Path]:
        """Return the entries of a directory, as everyone sees it; none if it does not exist or
        cannot be read.
        """
        return entries(directory)

    def all_below(self, directory: Path) -> Collection[Path]:
        """Return all files below a directory, perhaps with the directories between."""
        return list(directory.rglob("*"))

    def discard(self, path: Path) -> bool:
        """Remove a file or a directory for everyone; see `discard`."""
        return discard(path)

    def release(self, path: Path) -> None:
        """Allow this machine to drop its copy, which it does not need any more."""

    def trim(self, spared: Collection[Path]) -> None:
        """Drop the oldest copies on this machine that exceed its limit, except spared ones."""


def discard(path: Path) -> bool:
    """Remove a file, or a directory with its contents; return whether it is gone now.

    What cannot be removed is logged and left in place: nothing depends on its removal.
    """
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:  # of the path or of something in it: another process removes it too
        return not path.exists() or discard(path)
    except OSError as error:
        _log.error("%s is not needed any more, and cannot be removed: %s", path, error)
        return False
    return True


def entries(directory: Path) -> list[Path]:
    """Return the entries of a directory; none if it does not exist or cannot be read."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _log.error("%s cannot be read: %s", directory, error)
        return []
