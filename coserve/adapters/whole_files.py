"""Files that are replaced whole, and small files that are read whole."""

import os
from pathlib import Path

from coserve.errors import AdapterError


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that there is the old one or the new one at any moment, and nothing in
    between.
    """
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_small_file(path: Path, most_bytes: int) -> bytes | None:
    """Return a file's content; None if there is no such file.

    Raises:
        AdapterError: it cannot be read, or is longer.
    """
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > most_bytes:
        raise AdapterError(f"{path} is too long: {most_bytes:,} bytes are allowed")
    return content
