"""Record of which lines of a batch are under way, and of the deaths that are charged to them,
beside its results.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from coserve.server.batches.deaths import LineDeaths
from coserve.server.http.responses import to_json

_FILE = "under_way.jsonl"
# A journal that is smaller is not compacted.
_MIN_COMPACTED_BYTES = 1 << 18


class LineFile:
    """A file of JSON lines that is appended to, each line whole or not at all. Calls block; from
    any thread.

    What has been appended survives the death of this process; it is not synced, since a machine
    that loses power is no death that a line could be charged with.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()

    def append(self, *values: Any) -> None:
        """Add lines; OSError if there is no room, and then none of them is there."""
        content = b"".join(to_json(value) + b"\n" for value in values)
        with self._lock, self._path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                num_written = 0
                while num_written < len(content):  # a disk that fills up takes a part
                    num_written += file.write(content[num_written:])
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 if there is none."""
        return self._path.stat().st_size if self._path.exists() else 0

    def replace(self, values: Collection[Any]) -> None:
        """Keep these lines alone: all of them or, after an OSError, those of before. None of them
        need no room.
        """
        with self._lock:
            if not values:
                self._path.unlink(missing_ok=True)
                return
            part = self._path.with_name(f"{self._path.name}.part")
            with part.open("wb") as file:
                for value in values:
                    file.write(to_json(value) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)

    def read(self) -> Iterator[Any]:
        """Yield all lines, while nobody appends; a last one that was not written whole is
        removed.
        """
        if not self._path.exists():
            return
        num_bytes = 0
        with self._path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    num_bytes += len(raw)
                    yield json.loads(raw)
        if num_bytes < self._path.stat().st_size:
            os.truncate(self._path, num_bytes)

    def chunks(self) -> Iterator[bytes]:
        """Yield its content; nothing if there is no file."""
        if self._path.exists():
            with self._path.open("rb") as file:
                yield from iter(lambda: file.read(1 << 20), b"")


class BatchJournal:
    """The journal of one batch: a process that dies leaves in it the lines that were under way.
    Calls block; from any thread.

    Lines that are tried again add to it each time. What has no effect any more is dropped when the
    file has grown to twice its size after the last time, so that its size is bounded by the number
    of the batch's lines.
    """

    def __init__(self, directory: Path) -> None:
        self._file, self._lock = LineFile(directory / _FILE), Lock()
        self._max_bytes = _MIN_COMPACTED_BYTES

    def begin(self, custom_id: str) -> None:
        """Record that a line is under way; before anything is done for it."""
        self._append({"begin": custom_id})

    def leave(self, custom_id: str) -> None:
        """Record that a line is not under way any more, though it was not answered."""
        self._append({"leave": custom_id})

    def rest(self) -> None:
        """Record that no line is under way: of the journal only the deaths are left."""
        with self._lock:
            _, deaths = self._read()
            self._file.replace(_deaths_on_record(deaths))

    def died(self, deaths: Mapping[str, LineDeaths]) -> None:
        """Record the deaths of lines that were under way when a process died, and are not any
        more.
        """
        self._append(*_deaths_on_record(deaths))

    def read(self) -> tuple[set[str], dict[str, LineDeaths]]:
        """Return the lines that are under way, also those that were answered since; and the deaths
        of all lines.
        """
        with self._lock:
            return self._read()

    def _append(self, *values: Any) -> None:
        with self._lock:
            if self._file.num_bytes >= self._max_bytes:
                self._compact()
            self._file.append(*values)

    def _compact(self) -> None:
        """Drop all that has no effect any more; the lock is held."""
        under_way, deaths = self._read()
        self._file.replace([*_deaths_on_record(deaths), *({"begin": id} for id in under_way)])
        self._max_bytes = max(_MIN_COMPACTED_BYTES, 2 * self._file.num_bytes)

    def _read(self) -> tuple[set[str], dict[str, LineDeaths]]:
        under_way: set[str] = set()
        deaths: dict[str, LineDeaths] = {}
        for each in self._file.read():
            if "begin" in each:
                under_way.add(each["begin"])
            elif "leave" in each:
                under_way.discard(each["leave"])
            else:
                under_way.discard(each["died"])
                num_alone = each.get("num_alone", 0)  # earlier versions did not count them
                deaths[each["died"]] = LineDeaths(
                    num=each["num"], num_lines=each["num_lines"], num_alone=num_alone
                )
        return under_way, deaths


def _deaths_on_record(deaths: Mapping[str, LineDeaths]) -> list[dict[str, Any]]:
    """Return the lines of a journal that say these deaths."""
    return [{"died": id, **asdict(each)} for id, each in deaths.items()]
