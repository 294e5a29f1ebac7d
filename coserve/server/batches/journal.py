"""Record of which lines of a batch are running, and of the deaths that are charged to them.

It is stored beside the batch's results.
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
    """A file of JSON lines, each of which is appended completely or not at all.

    Methods block and may be called from any thread. Appended lines survive the death of this
    process; they are not synced, since a power failure is not a death to charge to a line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()

    def append(self, *values: Any) -> None:
        """Append lines.

        Raises:
            OSError: The disk is full; no line was added.
        """
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
        """Size of the file; 0 if it does not exist."""
        return self._path.stat().st_size if self._path.exists() else 0

    def replace(self, values: Collection[Any]) -> None:
        """Replace the content by these lines; on OSError the old content remains.

        An empty content needs no free space.
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
        """Yield all lines, and remove an incomplete last one. Nothing may be appended meanwhile."""
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
        """Yield the content in pieces; nothing if the file does not exist."""
        if self._path.exists():
            with self._path.open("rb") as file:
                yield from iter(lambda: file.read(1 << 20), b"")


class BatchJournal:
    """Journal of one batch, which shows the lines that were running when a process died.

    Methods block and may be called from any thread. A retried line adds to the journal each time.
    Entries without effect are dropped when the file has doubled since the last time, so that its
    size is bounded by the number of lines of the batch.
    """

    def __init__(self, directory: Path) -> None:
        self._file, self._lock = LineFile(directory / _FILE), Lock()
        self._max_bytes = _MIN_COMPACTED_BYTES

    def begin(self, custom_id: str) -> None:
        """Record that a line is running, before any work on it."""
        self._append({"begin": custom_id})

    def leave(self, custom_id: str) -> None:
        """Record that a line stopped running without an answer."""
        self._append({"leave": custom_id})

    def rest(self) -> None:
        """Record that no line is running; only deaths remain in the journal."""
        with self._lock:
            _, deaths = self._read()
            self._file.replace(_deaths_on_record(deaths))

    def died(self, deaths: Mapping[str, LineDeaths]) -> None:
        """Record deaths of lines that were running when a process died."""
        self._append(*_deaths_on_record(deaths))

    def read(self) -> tuple[set[str], dict[str, LineDeaths]]:
        """Return the running lines, including answered ones, and the deaths of all lines."""
        with self._lock:
            return self._read()

    def _append(self, *values: Any) -> None:
        with self._lock:
            if self._file.num_bytes >= self._max_bytes:
                self._compact()
            self._file.append(*values)

    def _compact(self) -> None:
        """Drop entries without effect; the caller holds the lock."""
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
    """Return journal entries of these deaths."""
    return [{"died": id, **asdict(each)} for id, each in deaths.items()]
