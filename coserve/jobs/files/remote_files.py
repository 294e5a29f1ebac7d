"""Shared storage at a URL that fsspec supports (an object store, an FTP server), with local copies
under the same names.

Nothing half-written is ever read as whole. A file counts once its record is written, after it was
uploaded. A directory has a marker beside its files, uploaded last, with their names and sizes:
without it the directory does not exist, and files of other sizes are rejected.
"""

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from coserve.errors import CoserveError, DataError, DiskFullError, StoreError
from coserve.home import is_disk_full, make_private
from coserve.jobs.files.shared_files import SharedFiles, discard, entries
from coserve.settings import without_password

_log = logging.getLogger(__name__)

MARKER = ".complete"
# Name of a file in a directory: never a path.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Protocols of files that only one process, or only this machine, can read.
_NOT_SHARED = ("memory", "file", "local")
# Delays between attempts of a failed call.
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
# Files that were used within this time may still be in use.
_IN_USE_S = 600.0
_Found = TypeVar("_Found")


def files_url(url: str | None = None) -> str | None:
    """Return the given URL, or else `$COSERVE_FILES_URL`; None: files lie in the home alone.

    Raises:
        ValueError: It is not a URL that every machine can read.
    """
    url = url or os.environ.get("COSERVE_FILES_URL") or None
    if url is None:
        return None
    protocol, _, rest = url.partition("://")
    if not rest or not protocol:
        raise ValueError(
            f"files_url must be a URL of fsspec's, such as s3://bucket/prefix, not {url!r}"
        )
    if protocol in _NOT_SHARED:
        raise ValueError(
            f"files_url must be a URL that every machine reads, not {protocol}://; a shared path "
            f"is --home"
        )
    return url


def shared_files(url: str | None, root: Path, *, most_bytes: int | None = None) -> SharedFiles:
    """Return the storage at a URL, with local copies below `root`; None: `root` alone.

    Args:
        url: URL of the storage.
        root: Directory of the local copies.
        most_bytes: See `RemoteFiles`.
    """
    return SharedFiles() if url is None else RemoteFiles(url, root, most_bytes=most_bytes)


class RemoteFiles(SharedFiles):
    """Shared storage at a URL. Paths that are not below `root` belong to this machine alone."""

    def __init__(
        self,
        url: str,
        root: Path,
        *,
        most_bytes: int | None = None,
        waits_s: Sequence[float] | None = None,
    ) -> None:
        """Connect a directory with a URL.

        Args:
            url: URL of the storage.
            root: Directory of the local copies.
            most_bytes: Bytes of checkpoints and examples that may stay below `root` (None: all
                may).
            waits_s: Delays between attempts of a failed call (default: a few seconds in total).
        """
        self._url, self._root, self._most_bytes = url.rstrip("/"), root, most_bytes
        self._waits_s = _WAITS_S if waits_s is None else waits_s

    def check(self) -> None:
        name = f".coserve-{uuid4().hex}"

        def try_it(fs: Any, base: str) -> None:
            with tempfile.TemporaryDirectory() as directory:
                written, read = Path(directory) / "written", Path(directory) / "read"
                written.write_text(name)
                _put(fs, written, f"{base}/{name}")
                _get(fs, f"{base}/{name}", read, len(name))
                if read.read_text() != name:
                    raise OSError("what was read is not what was written")
            fs.rm_file(f"{base}/{name}")

        # Without retries: a wrong URL fails at once when the server starts.
        self._do(try_it, waits_s=())

    # -- from here to there -----------------------------------------------------------

    def keep(self, path: Path) -> None:
        if not self._is_shared(path):
            return

        def upload(fs: Any, base: str) -> None:
            target = self._place(base, path)
            if not path.is_dir():
                _put(fs, path, target)
                return
            files = sorted(path.iterdir())
            for each in files:
                _put(fs, each, f"{target}/{each.name}")
            # Last, since a directory without its marker does not exist for readers.
            fs.pipe_file(
                f"{target}/{MARKER}",
                json.dumps({each.name: each.stat().st_size for each in files}).encode(),
            )

        self._do(upload)

    def keep_checkpoint(self, directory: Path) -> Path:
        # Two engines may write the same step, one of them late: the suffix keeps both apart.
        named = directory.rename(directory.with_name(f"{directory.name}-{uuid4().hex[:8]}"))
        self.keep(named)
        return named

    # -- from there to here -----------------------------------------------------------

    def fetch(self, path: Path) -> None:
        if not self._is_shared(path):
            return
        if path.exists():
            with suppress(OSError):
                os.utime(path)  # time of last use, for `trim`
            return
        make_private(path.parent)
        # Every download has a part of its own, since others may fetch the same path.
        part = path.with_name(f".part-{uuid4().hex}")

        def download(fs: Any, base: str) -> None:
            target = self._place(base, path)
            if (size := _size(fs, f"{target}/{MARKER}")) is not None:
                part.mkdir(exist_ok=True)
                _fetch_directory(fs, target, part, size)
            elif (size := _size(fs, target)) is not None:
                _get(fs, target, part, size)

        try:
            self._do(download)
            if part.exists():
                os.utime(part)
                _move(part, path)
        finally:
            discard(part)

    # -- what is there ----------------------------------------------------------------

    def is_file(self, path: Path) -> bool:
        if not self._is_shared(path):
            return path.is_file()
        return self._do(lambda fs, base: _size(fs, self._place(base, path))) is not None

    def entries(self, directory: Path) -> list[Path]:
        def names(fs: Any, base: str) -> Sequence[str]:
            return [str(each) for each in fs.ls(self._place(base, directory), detail=False)]

        none: Sequence[str] = ()
        paths = {directory / Path(name.rstrip("/")).name for name in self._tried(names, none)}
        return sorted({*paths, *entries(directory)} - {directory})

    def all_below(self, directory: Path) -> Collection[Path]:
        def names(fs: Any, base: str) -> Sequence[Path]:
            top = self._place(base, directory)
            return [directory / Path(str(each)).relative_to(top) for each in fs.find(top)]

        none: Sequence[Path] = ()
        return {*self._tried(names, none), *super().all_below(directory)}

    def discard(self, path: Path) -> bool:
        if not discard(path):
            return False
        if not self._is_shared(path):
            return True

        def remove(fs: Any, base: str) -> bool:
            target = self._place(base, path)
            # A directory, or nothing: then `rm` raises FileNotFoundError, which counts as removed.
            if _size(fs, target) is None:
                fs.rm(target, recursive=True)
            else:
                fs.rm_file(target)
            return True

        return self._tried(remove, False, missing=True)

    # -- what is here -----------------------------------------------------------------

    def release(self, path: Path) -> None:
        if self._most_bytes is not None and self._is_shared(path):
            discard(path)

    def trim(self, spared: Collection[Path]) -> None:
        if self._most_bytes is None:
            return
        now_s, total = time.time(), 0
        jobs = self._root / "jobs"
        paths = [
            *jobs.glob("*/*.msgpack"),
            *jobs.glob("*/checkpoints/*"),
            *jobs.glob("*/contributions/*/*"),
        ]
        # Newest use first, so that the least recently used exceed the limit.
        for used_s, path, num_bytes in sorted(map(_use_of, paths), reverse=True):
            total += num_bytes
            if total > self._most_bytes and path not in spared and now_s - used_s > _IN_USE_S:
                discard(path)

    # -- calls ------------------------------------------------------------------------

    def _is_shared(self, path: Path) -> bool:
        return path.is_relative_to(self._root)

    def _place(self, base: str, path: Path) -> str:
        return f"{base}/{path.relative_to(self._root).as_posix()}"

    def _tried(
        self, do: Callable[[Any, str], _Found], otherwise: _Found, *, missing: _Found | None = None
    ) -> _Found:
        """Call `do` once; log errors and return `otherwise` instead.

        Args:
            do: Receives the file system and the path of the URL.
            otherwise: Result if the call fails.
            missing: Result if the path does not exist (None: `otherwise`).
        """
        try:
            return self._do(do, waits_s=())
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return otherwise if missing is None else missing
            _log.error("%s", error)
            return otherwise

    def _do(
        self, do: Callable[[Any, str], _Found], *, waits_s: Sequence[float] | None = None
    ) -> _Found:
        """Call `do` with the file system and the path of the URL, and retry after errors.

        Raises:
            StoreError: All attempts failed.
            DiskFullError: This machine's disk is full.
        """
        # None marks the last attempt, whose error is raised.
        for wait_s in (*(self._waits_s if waits_s is None else waits_s), None):
            try:
                return do(*_open(self._url))
            except CoserveError:
                raise
            except Exception as error:  # each of fsspec's packages has errors of its own
                if isinstance(error, OSError) and is_disk_full(error):
                    raise DiskFullError(
                        f"the disk is full: what is needed of {self._shown} has no room"
                    ) from error
                problem = StoreError(
                    f"the files at {self._shown} cannot be used: {_reason(error)}; see that the "
                    f"URL is right, that it "
                    "is reached from here, and that its credentials may read and write there"
                )
                if wait_s is None or isinstance(error, ImportError):
                    raise problem from error
                _log.warning("%s (trying again)", problem)
            time.sleep(wait_s)
        raise AssertionError

    @property
    def _shown(self) -> str:
        return without_password(self._url)


def _open(url: str) -> tuple[Any, str]:
    """Return a fresh connection, with empty caches, and its path."""
    from fsspec.core import url_to_fs

    fs, base = url_to_fs(url)
    fs.invalidate_cache()
    return fs, base.rstrip("/")


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"{words}, here and on every node"
    return words or type(error).__name__


def _size(fs: Any, target: str) -> int | None:
    """Return the size of a file in bytes; None if there is none."""
    try:
        info = fs.info(target)
    except FileNotFoundError:
        return None
    return int(info["size"]) if info["type"] == "file" else None


def _put(fs: Any, path: Path, target: str) -> None:
    for is_last in (False, False, False, True):
        try:
            fs.put_file(str(path), target)
            break
        except Exception:  # each of fsspec's packages has errors of its own
            if is_last:
                raise
            # Another process may have made the directory, or what it lies in, since this one
            # looked.
            fs.invalidate_cache()
    if (there := _size(fs, target)) != (here := path.stat().st_size):
        raise OSError(f"{path.name} has {here} bytes, and {there} of them were uploaded")


def _get(fs: Any, target: str, path: Path, size: int) -> None:
    fs.get_file(target, str(path))
    if (here := path.stat().st_size) != size:
        raise OSError(f"{target} has {size} bytes, and {here} were downloaded")


def _fetch_directory(fs: Any, target: str, part: Path, marker_bytes: int) -> None:
    """Download the files of the marker that still exist: files that only the job needs are removed
    when it is over.
    """
    marker = part / MARKER
    _get(fs, f"{target}/{MARKER}", marker, marker_bytes)
    for name, size in _read_marker(marker, target).items():
        if (there := _size(fs, f"{target}/{name}")) is None:
            continue
        if there != size:
            raise OSError(f"{target}/{name} has {there} bytes, and had {size} when it was written")
        _get(fs, f"{target}/{name}", part / name, size)
    marker.unlink()


def _read_marker(marker: Path, target: str) -> dict[str, int]:
    """Return the sizes of files by name.

    Raises:
        DataError: The marker is not one that `keep` has written.
    """
    try:
        sizes = json.loads(marker.read_bytes())
    except (ValueError, RecursionError):
        sizes = None
    if not isinstance(sizes, dict) or not all(
        _NAME.fullmatch(name) and type(size) is int and size >= 0 for name, size in sizes.items()
    ):
        raise DataError(f"{target}/{MARKER} is damaged: it does not say which files there are")
    return sizes


def _move(part: Path, path: Path) -> None:
    """Rename a download, unless another thread has completed the same one before."""
    try:
        part.rename(path)
    except OSError:
        if not path.exists():
            raise


def _use_of(path: Path) -> tuple[float, Path, int]:
    """Return the time of last use and the size of a path; zeros if it is removed meanwhile."""
    try:
        files = [each.stat() for each in path.iterdir()] if path.is_dir() else []
        own = path.stat()
        return own.st_mtime, path, own.st_size + sum(each.st_size for each in files)
    except OSError:
        return 0.0, path, 0
