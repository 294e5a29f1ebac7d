"""A small disk that can be filled and emptied: a file system in memory, where mounting is
allowed."""

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

_CHUNK = b"\0" * 65536


class SmallDisk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filling = path / "filling"

    def fill(self) -> None:
        """Leave no room at all, nor in the log of a store that is here."""
        if (database := self.path / "coserve.db").exists():
            with closing(sqlite3.connect(database, timeout=5)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with self._filling.open("ab", buffering=0) as file:
            for chunk in (_CHUNK, b"\0" * 4096, b"\0"):
                with suppress(OSError):
                    while file.write(chunk) == len(chunk):
                        pass

    def empty(self) -> None:
        """Give the room back."""
        self._filling.unlink()


@contextmanager
def small_disk(path: Path, size: str = "24m") -> Iterator[SmallDisk]:
    """Skips the test where nothing can be mounted."""
    path.mkdir()
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={size},mode=700,uid={os.geteuid()}",
        "coserve-test",
        str(path),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"there is no mount: {error}")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
