"""The directory where coserve keeps what outlives a process: files, jobs, adapters, profiles, compiled kernels."""

import os
from pathlib import Path


def home_directory(given: str | Path | None = None) -> Path:
    """The one that was given, or else `$COSERVE_HOME`, or else `~/.coserve`; absolute, not necessarily there yet."""
    return Path(given or os.environ.get("COSERVE_HOME") or "~/.coserve").expanduser().absolute()
