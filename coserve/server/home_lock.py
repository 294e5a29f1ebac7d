"""One server at a time in a home directory."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.errors import CoserveError


@contextmanager
def lock_home(directory: Path) -> Iterator[None]:
    """Keep other servers out of it; the system releases the lock when this process ends, however it ends.

    Two servers in one home would take up the same jobs, and tidy away what the other is writing.

    Raises:
        CoserveError: another server is there, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a")
    except OSError as error:
        reason = error.strerror or error
        raise CoserveError(f"{directory} cannot be written: {reason}; choose another --home") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CoserveError(
                f"another server uses {directory}: end it, or choose another --home (or COSERVE_HOME)"
            ) from None
        yield
