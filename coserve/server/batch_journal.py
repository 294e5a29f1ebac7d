"""Record of which lines of a batch are under way, and of the deaths that are charged to them, beside its results."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from coserve.server.batch_deaths import LineDeaths
from coserve.server.responses import to_json

_FILE = "under_way.jsonl"


class LineFile:
    """A file of JSON lines that is appended to, each line whole or not at all. Calls block; from any thread.

    What has been appended survives the death of this process; it is not synced, since a machine that loses power is no
    death that a line could be charged with.
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

    def read(self) -> Iterator[Any]:
        """Yield all lines, while nobody appends; a last one that was not written whole is removed."""
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
    """The journal of one batch. A process that dies leaves the lines in it that it was at. Calls block."""

    def __init__(self, directory: Path) -> None:
        self._file = LineFile(directory / _FILE)

    def begin(self, custom_id: str) -> None:
        """Record that a line is under way; before anything is done for it."""
        self._file.append({"begin": custom_id})

    def leave(self, custom_id: str) -> None:
        """Record that a line is not under way any more, though it was not answered."""
        self._file.append({"leave": custom_id})

    def rest(self) -> None:
        """Record that no line is under way: the server ends in good order."""
        self._file.append({"rest": True})

    def died(self, deaths: Mapping[str, LineDeaths]) -> None:
        """Record the deaths of lines that were under way when a process died, and are not any more."""
        self._file.append(*({"died": id, "num": each.num, "num_lines": each.num_lines} for id, each in deaths.items()))

    def read(self) -> tuple[set[str], dict[str, LineDeaths]]:
        """Return the lines that are under way, also those that were answered since; and the deaths of all lines."""
        under_way: set[str] = set()
        deaths: dict[str, LineDeaths] = {}
        for each in self._file.read():
            if "begin" in each:
                under_way.add(each["begin"])
            elif "leave" in each:
                under_way.discard(each["leave"])
            elif "died" in each:
                under_way.discard(each["died"])
                deaths[each["died"]] = LineDeaths(num=each["num"], num_lines=each["num_lines"])
            else:
                under_way.clear()
        return under_way, deaths
