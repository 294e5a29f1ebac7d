"""The directories where coserve keeps what outlives a process: a home with files, jobs and
adapters, and a cache.

The cache has what was compiled and measured on this machine, and all homes of a user share it.

Both are for one user alone: what clients upload is in the home, and code that runs is in the cache.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

_DIRECTORY_MODE, _FILE_MODE = 0o700, 0o600
_OF_OTHERS, _WRITE_OF_OTHERS = 0o077, 0o022


def home_directory(given: str | Path | None = None) -> Path:
    """The one that was given, or else `$COSERVE_HOME`, or else `~/.coserve`; absolute, not
    necessarily there yet.
    """
    return Path(given or os.environ.get("COSERVE_HOME") or "~/.coserve").expanduser().absolute()


def home_environment(home: Path | None) -> dict[str, str]:
    """What a process is to have in its environment that keeps its state there (None: where this one
    does).
    """
    return {} if home is None else {"COSERVE_HOME": str(home)}


def cache_directory() -> Path:
    """Return the directory for what can be made again on this machine: `$COSERVE_CACHE`, or
    `$XDG_CACHE_HOME/coserve`, or `~/.cache/coserve`; a directory in the home where none can be
    made, such as for a user without a home.
    """
    if given := os.environ.get("COSERVE_CACHE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "coserve"
        make_private(cache)
        if os.access(cache, os.W_OK):
            return cache
    except (OSError, RuntimeError):
        pass
    return home_directory() / "cache"


def make_private(directory: Path) -> bool:
    """Have a directory that no other user may enter; returns whether it is so.

    It is made if it is missing, and closed to others if it is this user's. One of another user, one
    that all share (with the sticky bit, as /tmp has it) and the root of all stay as they are.
    OSError if it cannot be made.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
    found = directory.stat()
    is_shared = bool(found.st_mode & stat.S_ISVTX) or directory.resolve() == Path(directory.anchor)
    if found.st_uid != os.geteuid() or is_shared:
        return False
    if found.st_mode & _OF_OTHERS:
        directory.chmod(_DIRECTORY_MODE)
    return True


def closed_mode(mode: int) -> int:
    """Permissions, without those of other users."""
    return stat.S_IMODE(mode) & ~_OF_OTHERS


def close_files(directory: Path) -> None:
    """Close this user's files in a directory (not in those below it) to others: an older version
    left them open.
    """
    for path in directory.iterdir():
        found = path.lstat()
        if (
            stat.S_ISREG(found.st_mode)
            and found.st_uid == os.geteuid()
            and found.st_mode & _OF_OTHERS
        ):
            path.chmod(_FILE_MODE)


@contextmanager
def private_files() -> Iterator[None]:
    """Whatever this process, and those that it starts, make meanwhile, no other user may read.

    Several may be within at once: the mask is the process's, and is as it was once the last has
    left.
    """
    _mask.enter()
    try:
        yield
    finally:
        _mask.leave()


class _PrivateMask:
    def __init__(self) -> None:
        self._lock, self._num_within, self._before = Lock(), 0, 0

    def enter(self) -> None:
        with self._lock:
            if not self._num_within:
                self._before = os.umask(_OF_OTHERS)
            self._num_within += 1

    def leave(self) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                os.umask(self._before)


_mask = _PrivateMask()


def is_disk_full(error: OSError) -> bool:
    """Whether a file could not be written since its disk, or this user's part of it, has no
    room.
    """
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_trusted(path: Path) -> bool:
    """Whether nobody but this user, and the system's own, can have written a file, or put it where
    it is: then what is in it may be run. OSError if it is not there.
    """
    file, directory = path.stat(), path.resolve().parent.stat()
    is_ours = {file.st_uid, directory.st_uid} <= {os.geteuid(), 0}
    # With the sticky bit, nobody takes away what is another's.
    is_closed = not directory.st_mode & _WRITE_OF_OTHERS or directory.st_mode & stat.S_ISVTX
    return is_ours and bool(is_closed) and not file.st_mode & _WRITE_OF_OTHERS
