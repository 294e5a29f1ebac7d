"""ZIP archives that are written while they are sent, and merged models for them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from coserve.errors import AdapterError
from coserve.models.source import check_room_for_copy

_CHUNK_BYTES = 1 << 20
# Lowest priority of a process: merging must not slow down requests.
_NICE = 19


class _Sink(RawIOBase):
    """An append-only file whose bytes are taken out as they come."""

    def __init__(self) -> None:
        self._written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        """Return what was written since the last call."""
        written = bytes(self._written)
        self._written.clear()
        return written


def zipped(paths: Sequence[Path], *, folder: str) -> Iterator[bytes]:
    """Yield an uncompressed ZIP archive of files; weights hardly compress. Blocks while it reads.

    Args:
        paths: The files.
        folder: Name of their folder in the archive.
    """
    sink = _Sink()
    with ZipFile(sink, "w", ZIP_STORED) as archive:
        for path in paths:
            info = ZipInfo.from_file(path, f"{folder}/{path.name}")
            with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
                    yield sink.take()
    yield sink.take()


class Merging:
    """Merger of adapters into the weights of their model, one at a time, each in a process of its
    own.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        """Return whether an adapter is being merged."""
        return self._lock.locked()

    async def merge(self, model: str, adapter: Path, directory: Path) -> None:
        """Write a model with an adapter merged into it, as `coserve export --merge` does.

        Args:
            model: Directory or hub id of the model.
            adapter: Directory of the adapter.
            directory: Empty directory for the result.

        Raises:
            DiskFullError: The disk has no room for it.
            AdapterError: It cannot be merged, there is too little memory, or the process was
                killed.
        """
        command = (
            sys.executable,
            "-m",
            "coserve",
            "export",
            adapter,
            directory,
            "--merge",
            "--model",
            model,
        )
        async with self._lock:
            await asyncio.to_thread(check_room_for_copy, model, directory)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                preexec_fn=_give_way,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            try:
                _, stderr = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        if process.returncode:
            lines = stderr.decode(errors="replace").strip().splitlines()
            raise AdapterError(lines[-1] if lines else "the process that merged it was killed")


def _give_way() -> None:
    """Lower the priority of this process, so that requests and jobs run first."""
    os.nice(_NICE)
