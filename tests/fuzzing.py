"""Number of calls that `make fuzz` asks for, and counts of those that were made, over all of its
test files."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from processes import is_alive
from served import Served

# Zero: the few that tests make.
NUM_CALLS = int(os.environ.get("COSERVE_FUZZ_CALLS", "0"))
# Hypothesis remembers all examples of a round, and with thousands takes ever longer to make the
# next.
NUM_ROUNDS = max(1, NUM_CALLS // 24_000)
_started_s = time.monotonic()
# Calls by the status of their answer.
_statuses: Counter[int] = Counter()
# Tests after which the server or its engine was another process than before.
_num_deaths = 0


def note(status: int) -> None:
    """Count an answer; the number is shown after each thousand, so that a run that is cut short has
    shown it, too."""
    _statuses[status] += 1
    if NUM_CALLS and _statuses.total() % 1000 == 0:
        print(f"{_statuses.total():,} calls", file=sys.__stderr__, flush=True)


def in_rounds(check: Callable[[], None]) -> None:
    """Run a check in as many rounds as the number of calls needs."""
    for _ in range(NUM_ROUNDS):
        check()


@contextmanager
def surviving(served: Served) -> Iterator[None]:
    """Count a death and fail if the server's or the engine's process is gone when the block
    ends."""
    global _num_deaths
    engine = served.engine_pid()
    try:
        yield
    finally:
        is_whole = served.process.poll() is None and is_alive(engine)
        _num_deaths += not is_whole
    assert is_whole, f"the server or its engine died; the log: {served.log.read_text()[-4000:]}"


def summary() -> str:
    """Return one line: calls, statuses, deaths."""
    by_status = ", ".join(f"{number:,} x {status}" for status, number in sorted(_statuses.items()))
    return (
        f"fuzz: {_statuses.total():,} calls answered in {time.monotonic() - _started_s:,.0f} s "
        f"({by_status}); "
        f"{_num_deaths} deaths of the server or its engine"
    )
