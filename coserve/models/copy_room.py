"""A check for disk space for a copy of a model with some weights changed."""

import shutil
from pathlib import Path

from coserve.errors import DiskFullError, UnknownModelError
from coserve.models.source import find_here, model_files

# Left free for others that write there, and for a head that is written beside the table that it
# was: as much again as the model's files have, up to this.
_MAX_SPARE_BYTES = 10_000_000_000


def check_room(model: str, directory: Path) -> None:
    """Check that the disk of a directory has room for a copy of a model, with some to spare.
    Blocks.

    A model whose files are not on this machine is not checked.

    Raises:
        DiskFullError: there is not enough room.
    """
    try:
        files = model_files(find_here(model))
    except UnknownModelError:
        return
    num_bytes = sum(path.stat().st_size for path in files)
    needed_bytes = num_bytes + min(num_bytes, _MAX_SPARE_BYTES)
    free_bytes = shutil.disk_usage(directory).free
    if needed_bytes > free_bytes:
        raise DiskFullError(
            f"the merged model needs {needed_bytes / 1e9:.3g} GB of free disk, and "
            f"{free_bytes / 1e9:.3g} GB are free"
        )
