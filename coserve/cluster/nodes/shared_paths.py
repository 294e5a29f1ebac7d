"""Whether a node sees by a path what the front sees there: each takes a digest of some of a file's
bytes, and the front compares. Nothing heavy is imported here, since nodes do it before they have an
engine.
"""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import msgspec

from coserve.home import make_private

# Of each file, pieces of this many bytes: the first, the last, and some that are evenly between.
_NUM_PIECES, _PIECE_BYTES = 8, 4096
# What the front and nodes write in a home to find out about it.
_PROBE = ".seen-by-nodes-"


class ExpectedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """As the front sees them. what: in words. digest: see `sampled_digest`. advice: to who has a
    node that does not.
    """

    what: str
    paths: tuple[str, ...]
    digest: str
    advice: str


class SharedPaths(msgspec.Struct, frozen=True, kw_only=True):
    """What a node must see as the front does. home: where it writes, too; None: files come by a
    URL.
    """

    files: tuple[ExpectedFiles, ...] = ()
    home: str | None = None


def sampled_digest(paths: Iterable[str | Path]) -> str:
    """Of names, sizes and some bytes of files: however large they are, it is there in milliseconds.
    OSError if one cannot be read.
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
    """A file that only the home of this front has; those of fronts before are removed. OSError."""
    make_private(home)
    for old in home.glob(f"{_PROBE}*"):
        old.unlink(missing_ok=True)
    # Of a new name: what a file system remembers of another on another machine says nothing of this
    # one.
    path = home / f"{_PROBE}{uuid4().hex}"
    _write(path)
    return path


def unseen(shared: SharedPaths) -> str | None:
    """What a node, which this is, does not see as the front does, in one line; None: it sees all.
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
