"""Comparison of files between the front and a node: each takes a digest of some of a file's bytes.

Nothing heavy is imported here, since nodes do this before they have an engine.
"""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import msgspec

from coserve.home import make_private

# Number and size of the pieces of each file: the first, the last, and some evenly between them.
_NUM_PIECES, _PIECE_BYTES = 8, 4096
# Prefix of the files that the front and nodes write into a home to check it.
_PROBE = ".seen-by-nodes-"


class ExpectedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files as the front sees them."""

    what: str
    """Name of the files in messages."""
    paths: tuple[str, ...]
    """Their paths."""
    digest: str
    """Their `sampled_digest`."""
    advice: str
    """Advice for the operator of a node that does not see them."""


class SharedPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Files and directories that a node must see as the front does."""

    files: tuple[ExpectedFiles, ...] = ()
    """The files."""
    home: str | None = None
    """Directory where the node writes, too; None: files come by a URL."""


def sampled_digest(paths: Iterable[str | Path]) -> str:
    """Return a digest of the names, sizes and some bytes of files; takes milliseconds whatever
    their size.

    Raises:
        OSError: A file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for path in map(Path, paths):
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode())
            last = max(0, size - _PIECE_BYTES)
            for at in sorted({last * number // (_NUM_PIECES - 1) for number in range(_NUM_PIECES)}):
                file.seek(at)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def write_probe(home: Path) -> Path:
    """Write a file that only the home of this front has, and remove those of earlier fronts.

    Raises:
        OSError: The home cannot be written.
    """
    make_private(home)
    for old in home.glob(f"{_PROBE}*"):
        old.unlink(missing_ok=True)
    # A new name each time: caches of a network file system may still have an older file.
    path = home / f"{_PROBE}{uuid4().hex}"
    _write(path)
    return path


def unseen(shared: SharedPaths) -> str | None:
    """Return in one line what this node does not see as the front does; None if it sees all.
    Blocks.
    """
    for seen in shared.files:
        try:
            reason = None if sampled_digest(seen.paths) == seen.digest else "there are others here"
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        if reason is not None:
            return f"it does not see {seen.what} as the front does ({reason}): {seen.advice}"
    if shared.home is not None:
        path = Path(shared.home) / f"{_PROBE}{uuid4().hex}"
        try:
            _write(path)
            path.unlink()
        except OSError as error:
            return (
                f"it cannot write {shared.home} ({error.strerror}): it must run as a user who may"
            )
    return None


def _write(path: Path) -> None:
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(path.name)
