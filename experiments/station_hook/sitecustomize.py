"""A recorder of the functions of a package that run in this process: Python imports this file at
its start.

`experiments/stations.py` puts this folder on PYTHONPATH. Where its variables are set, every process
and its threads write a line of JSON for each function when it first runs in a window of time, and
for each pair of files of which one calls the other. One byte of a shared file has the number of the
window; 0: none.
"""

import json
import mmap
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_PLACE, _PACKAGE = os.environ.get("STATIONS_PLACE"), os.environ.get("STATIONS_PACKAGE", "")
# Bodies of modules and classes run while they are imported; they have no locals of their own that
# are numbered.
_CO_OPTIMIZED = 1


class _Recorder:
    """A recorder of what is new in the open window."""

    def __init__(self, place: str, package: str) -> None:
        self._place, self._prefix = place, package.rstrip(os.sep) + os.sep
        with open(os.path.join(place, "window"), "rb") as file:
            self._window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._names: dict[CodeType, tuple[str, str, int] | None] = {}
        self.begin()

    def begin(self) -> None:
        """Open a file of this process's own."""
        self._seen: set[Any] = set()
        self._file: int | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call (`sys.setprofile`)."""
        if event != "call" or not (window := self._window[0]):
            return
        code, caller = frame.f_code, frame.f_back
        pair = window, code, None if caller is None else caller.f_code
        if pair in self._seen:
            return
        self._seen.add(pair)
        if (own := self._name(code)) is None:
            return
        self._write(window, "function", own)
        if (
            pair[2] is not None
            and (other := self._name(pair[2])) is not None
            and other[0] != own[0]
        ):
            self._write(window, "call", (other[0], own[0]))

    def _name(self, code: CodeType) -> tuple[str, str, int] | None:
        """Return the file, name and line of a function of the package."""
        if code not in self._names:
            is_ours = code.co_filename.startswith(self._prefix) and code.co_flags & _CO_OPTIMIZED
            is_named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
            path = code.co_filename[len(self._prefix) :]
            self._names[code] = (
                (path, code.co_qualname, code.co_firstlineno) if is_ours and is_named else None
            )
        return self._names[code]

    def _write(self, window: int, kind: str, what: tuple[object, ...]) -> None:
        if (window, kind, what) in self._seen:
            return
        self._seen.add((window, kind, what))
        if self._file is None:
            path = os.path.join(self._place, f"{os.getpid()}.jsonl")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        os.write(self._file, (json.dumps([window, kind, *what]) + "\n").encode())


if _PLACE:
    _recorder = _Recorder(_PLACE, _PACKAGE)
    os.register_at_fork(after_in_child=_recorder.begin)
    threading.setprofile(_recorder)
    sys.setprofile(_recorder)
