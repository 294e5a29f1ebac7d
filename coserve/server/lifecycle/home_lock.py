"""Lock of a home directory, so that only one server uses it."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.errors import CoserveError
from coserve.home import close_files, make_private

LOCK_FILE = "lock"
_log = logging.getLogger(__name__)


@contextmanager
def lock_home(directory: Path, *, close: bool = True) -> Iterator[None]:
    """Lock a home directory; the system releases the lock when this process ends in any way.

    Two servers in one home would run the same jobs, and remove files that the other is writing.

    Args:
        directory: The home.
        close: Whether it is closed to other users as well.

    Raises:
        CoserveError: Another server uses it, or it cannot be written.
    """
    try:
        if not close:
            pass
        elif make_private(directory):
            close_files(directory)
        else:
            _log.warning(
                "%s can be read by other users, and so can files and jobs in it", directory
            )
        file = (directory / LOCK_FILE).open("a")
    except OSError as error:
        reason = error.strerror or error
        raise CoserveError(
            f"{directory} cannot be written: {reason}; choose another --home"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CoserveError(
                f"a server uses {directory}: end it, or choose another --home (or COSERVE_HOME)"
            ) from None
        yield
