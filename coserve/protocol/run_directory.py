"""Places of an engine's socket, of the pages that it shares, and of the file in which it notes its
jobs for when it dies.

They are in the home or linked from there, so that the next start finds and removes what a killed
server has left.
"""

import os
import shutil
import struct
import tempfile
from pathlib import Path

from coserve.home import is_disk_full, make_private

# Linux: sun_path has 108 bytes with the zero at its end; macOS: 104 (unix(7)).
_MAX_ADDRESS_BYTES = 103
_SOCKET, _PAGES = "engine", "pages"
_SHARED_MEMORY = Path("/dev/shm")

# The activity file: a header, and two slots of ids, each terminated by a zero. There are two, since
# the process may die while it writes one of them.
ACTIVITY_HEAD = struct.Struct("<IB")
"""Id of the process, and the index of the slot that is valid."""
ACTIVITY_SLOT_BYTES = 4096
ACTIVITY_FILE_BYTES = ACTIVITY_HEAD.size + 2 * ACTIVITY_SLOT_BYTES


def make_socket_directory(home: Path) -> Path:
    """Make a new directory that only this user can enter.

    Where the home's path is too long for the address of a socket, the directory lies elsewhere, and
    a link to it is returned. Where the home's disk is full, it lies elsewhere without a link.
    """
    run = home / "run"
    try:
        make_private(run)
        directory = Path(tempfile.mkdtemp(dir=run, prefix=""))
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Path(tempfile.mkdtemp(prefix="coserve-"))
    if len(os.fsencode(directory / _SOCKET)) > _MAX_ADDRESS_BYTES:
        directory.rmdir()
        directory.symlink_to(tempfile.mkdtemp(prefix="coserve-"))
    return directory


def socket_address(directory: Path) -> str:
    """Return the ZeroMQ address of the engine's socket in a directory."""
    return f"ipc://{directory.resolve() / _SOCKET}"


def activity_file(directory: Path) -> Path:
    """Return the file in which the engine notes the jobs that it works for."""
    return directory.resolve() / "activity"


def make_pages_directory(address: str) -> Path:
    """Make the directory of an engine's page files, which go from process to process.

    It lies in memory where the system has a place for that, with a link in the socket's directory,
    so that both are removed together.

    Args:
        address: Address of the engine's socket.
    """
    link = Path(address.removeprefix("ipc://")).parent / _PAGES
    if not os.access(_SHARED_MEMORY, os.W_OK):
        link.mkdir(mode=0o700)
        return link
    directory = Path(tempfile.mkdtemp(dir=_SHARED_MEMORY, prefix="coserve-"))
    link.symlink_to(directory)
    return directory


def remove_socket_directory(directory: Path) -> None:
    """Remove a socket's directory with its link, if it has one, and with the engine's pages."""
    pages = directory.resolve() / _PAGES
    if pages.is_symlink():
        shutil.rmtree(pages.resolve(), ignore_errors=True)
    shutil.rmtree(directory.resolve(), ignore_errors=True)
    if directory.is_symlink():
        directory.unlink()


def clear_socket_directories(home: Path) -> None:
    """Remove all socket directories of a home, which nobody else may use now."""
    run = home / "run"
    for directory in run.iterdir() if run.is_dir() else ():
        remove_socket_directory(directory)
