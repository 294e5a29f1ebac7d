"""What a server and its engine log: as text or as JSON, each line with the request that it belongs
to; a line that comes again and again is counted.
"""

import atexit
import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# The request that is being answered, "" where there is none.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_TEXT = "%(levelname)s %(name)s: %(message)s%(request)s"
# How many times a line may come within these seconds before it is counted.
_FREE, _WINDOW_S = 5, 10.0
_MOST_KINDS = 1000
_KIND_LENGTH = 200
# What every record has: the rest was given as `extra`.
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "request",
    "is_count",
    "color_message",
}


def configure_logs(format: str, level: str) -> None:
    """Log to stderr, from now on, and for the whole process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(_TEXT))
    handler.addFilter(add_request)
    repeats = RepeatFilter(handler.handle)
    handler.addFilter(repeats)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    atexit.register(repeats.flush)


def add_request(record: logging.LogRecord) -> bool:
    """Note which request a record belongs to."""
    id = getattr(record, "request_id", "") or request_id.get()
    vars(record).update(request_id=id, request=f" ({id})" if id else "")
    return True


class JsonFormatter(logging.Formatter):
    """One object a line: time (seconds since 1970), level, logger, message, request_id, and
    whatever is `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # With an underscore begin what other libraries, such as Ray, note in every record.
        given = {
            name: value
            for name, value in vars(record).items()
            if name not in _PLAIN and name[0] != "_"
        }
        line |= {name: value for name, value in given.items() if value not in ("", None)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@dataclass
class _Kind:
    """Lines that differ in numbers alone, in this window. num_held: those that were not written."""

    since_s: float
    num_seen: int = 0
    num_held: int = 0
    last: logging.LogRecord | None = None


class RepeatFilter(logging.Filter):
    """Lets a line pass five times in ten seconds; what comes more often is counted, and the count
    is a line when the ten seconds are over: with the next line of any kind. Lines below a warning
    all pass: they are wanted one by one.
    """

    def __init__(
        self,
        write: Callable[[logging.LogRecord], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """write: takes the lines with counts."""
        super().__init__()
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, int, str], _Kind] = OrderedDict()

    @property
    def num_kinds(self) -> int:
        """Of lines in whose windows it is counting."""
        return len(self._kinds)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        if record.levelno < logging.WARNING or getattr(record, "is_count", False):
            return True
        with self._lock:
            now_s = self._clock()
            ended = self._ended(now_s)
            passes = self._passes(record, now_s)
        for count in ended:
            self._write(count)
        return passes

    def flush(self) -> None:
        """Write all counts, of windows that are not over, too."""
        with self._lock:
            ended = self._ended(self._clock(), all=True)
        for count in ended:
            self._write(count)

    def _passes(self, record: logging.LogRecord, now_s: float) -> bool:
        key = record.name, record.levelno, re.sub(r"[0-9]+", "0", str(record.msg)[:_KIND_LENGTH])
        kind = self._kinds.setdefault(key, _Kind(now_s))
        kind.num_seen += 1
        if kind.num_seen <= _FREE:
            return True
        kind.num_held, kind.last = kind.num_held + 1, record
        return False

    def _ended(self, now_s: float, *, all: bool = False) -> list[logging.LogRecord]:
        """Counts of the windows that are over. Windows are in the order in which they began."""
        counts = []
        while self._kinds:
            key, kind = next(iter(self._kinds.items()))
            if not all and now_s - kind.since_s < _WINDOW_S and len(self._kinds) <= _MOST_KINDS:
                break
            del self._kinds[key]
            if kind.last is not None:
                counts.append(_count(kind.last, kind.num_held, now_s - kind.since_s))
        return counts


def _count(last: logging.LogRecord, num_held: int, seconds: float) -> logging.LogRecord:
    message = f"{num_held} more lines like this within {seconds:.0f} s: {last.getMessage()}"
    made = logging.LogRecord(
        last.name, last.levelno, last.pathname, last.lineno, message, None, None
    )
    vars(made).update(is_count=True)
    return made
