"""The directory where a server's files, jobs and adapters live: one server at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.errors import CoserveError


@contextmanager
def home_of_our_own(directory: Path) -> Iterator[None]:
    """Keep other servers out of it; the lock ends with this process, however that ends.

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
