"""Log lines: those that come again and again are counted, and each names its request."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from coserve.logs import JsonFormatter, RepeatFilter, add_request, request_id


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Log:
    """A logger with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handler = Kept()
        self.repeats = RepeatFilter(self.handler.handle, clock=lambda: self.now_s)
        self.handler.addFilter(add_request)
        self.handler.addFilter(self.repeats)
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.handler.lines


@pytest.fixture
def log() -> Iterator[Log]:
    token = request_id.set("")
    yield Log()
    request_id.reset(token)


def test_lines_that_repeat_are_counted(log: Log):
    for number in range(1000):
        log.logger.warning("no file left for connection %d", number)
        log.logger.error(f"out of files: fd={number}")
    assert len(log.lines) == 10
    log.now_s = 11.0
    log.logger.warning("something else")
    assert log.lines[10:] == [
        "995 more lines like this within 11 s: no file left for connection 999",
        "995 more lines like this within 11 s: out of files: fd=999",
        "something else",
    ]
    log.logger.warning("no file left for connection %d", 7)
    assert log.lines[-1] == "no file left for connection 7"


def test_what_was_held_is_written_at_the_end(log: Log):
    for _ in range(7):
        log.logger.warning("again")
    log.repeats.flush()
    assert log.lines == ["again"] * 5 + ["2 more lines like this within 0 s: again"]
    log.repeats.flush()
    assert len(log.lines) == 6


def test_lines_that_are_wanted_one_by_one_all_pass(log: Log):
    for number in range(100):
        log.logger.info("request %d", number)
    assert len(log.lines) == 100


def test_kinds_of_lines_are_not_kept_for_ever(log: Log):
    words = [
        f"{chr(97 + a)}{chr(97 + b)}{chr(97 + c)}"
        for a in range(26)
        for b in range(26)
        for c in range(3)
    ]
    for _ in range(6):
        for word in words:
            log.logger.warning(word)
    assert log.repeats.num_kinds <= 1001


def test_json_lines_name_their_request_and_what_was_given_beside_them(log: Log):
    log.handler.setFormatter(JsonFormatter())
    request_id.set("abc")
    log.logger.warning("status %d", 500, extra={"status": 500, "tenant": None, "_other": 1})
    try:
        raise ValueError("why")
    except ValueError:
        log.logger.exception("it broke", exc_info=sys.exc_info())
    first, second = map(json.loads, log.lines)
    assert first.pop("time") > 1.7e9
    assert first == {
        "level": "warning",
        "logger": "test",
        "message": "status 500",
        "request_id": "abc",
        "status": 500,
    }
    assert second["traceback"].endswith("ValueError: why") and "\n" not in log.lines[1]
