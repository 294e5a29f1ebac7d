"""Where a server and its engines keep what they share: files, examples, checkpoints. Here: a
directory that all of them read and write at the same path; elsewhere: `coserve.jobs.files.remote_files`.
"""

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

_log = logging.getLogger(__name__)


class SharedFiles:
    """Calls block; from any thread. Paths are of this machine."""

    def check(self) -> None:
        """StoreError, in one line, if it cannot be used."""

    def keep(self, path: Path) -> None:
        """A file, or a directory of files, has been written here whole: others find it when this
        returns.

        StoreError if that cannot be.
        """

    def keep_checkpoint(self, directory: Path) -> Path:
        """The same, of a directory whose name another engine may take, too; returns its name from
        now on.
        """
        return directory

    def fetch(self, path: Path) -> None:
        """Have here what others have kept, whole or not at all; who opens it finds out if it is not
        there.

        StoreError if it cannot be had now, DiskFullError if there is no room for it.
        """

    def is_file(self, path: Path) -> bool:
        """Whether others find it; StoreError if that cannot be known now."""
        return path.is_file()

    def entries(self, directory: Path) -> list[Path]:
        """What is in it, for all; nothing if it is not there, or cannot be read."""
        return entries(directory)

    def all_below(self, directory: Path) -> Collection[Path]:
        """Files in it, and in all directories in it; perhaps the directories, too."""
        return list(directory.rglob("*"))

    def discard(self, path: Path) -> bool:
        """Remove a file or a directory, for all; see `discard`."""
        return discard(path)

    def release(self, path: Path) -> None:
        """Nobody on this machine needs it any more."""

    def trim(self, spared: Collection[Path]) -> None:
        """Have no more here than there may be. spared: what is still needed."""


def discard(path: Path) -> bool:
    """Remove a file, or a directory and all in it; returns whether it is gone now.

    What cannot be removed is logged and left: nothing that matters hangs on it, and nothing waits
    for it.
    """
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:  # or something in it, which another has removed just now
        return not path.exists() or discard(path)
    except OSError as error:
        _log.error("%s is not needed any more, and cannot be removed: %s", path, error)
        return False
    return True


def entries(directory: Path) -> list[Path]:
    """What is in it; nothing if it is not there, or cannot be read."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _log.error("%s cannot be read: %s", directory, error)
        return []
