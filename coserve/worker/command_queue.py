"""Commands that must wait for a file, without holding up steps: they are read by threads, and done in turn.

Commands that share a key (an adapter, a job) are done in the order in which they came; others pass them. Slow ones come
one at a time, after all others: when an engine begins with many jobs, those who ask it something do not wait for them.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# Reads beside each other: a slow one holds up only those that want the same.
_NUM_THREADS = 4

# What a thread is to do before the command itself, or None if there is nothing to read.
Reading = Callable[[], Any] | None


@dataclass
class _QueuedCommand:
    keys: frozenset[str]
    prepare: Callable[[], Reading]
    do: Callable[[Any], None]
    label: str
    is_slow: bool
    reading: "Future[Any] | None" = None


class CommandQueue:
    """Belongs to one thread, which calls `poll` between steps."""

    def __init__(self) -> None:
        self._waiting: list[_QueuedCommand] = []
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "reader")

    @property
    def is_waiting(self) -> bool:
        """Whether there is a command that could not be done yet."""
        return bool(self._waiting)

    def put(
        self,
        keys: Collection[str],
        do: Callable[[Any], None],
        *,
        prepare: Callable[[], Reading] = lambda: None,
        label: str = "",
        is_slow: bool = False,
    ) -> None:
        """Do a command as soon as all earlier ones with one of its keys are done, and what it needs has been read.

        prepare: called when its turn has come; returns what a thread is to read. do: takes a call that returns what was
        read, or raises what went wrong. label: to discard it by. is_slow: it is left to `poll`, which does one such.
        """
        self._waiting.append(_QueuedCommand(frozenset(keys), prepare, do, label, is_slow))
        self._do_the_quick()

    def discard(self, label: str) -> bool:
        """Forget a command that has not been done; returns whether there was one."""
        kept = [each for each in self._waiting if each.label != label]
        found, self._waiting = len(kept) < len(self._waiting), kept
        return found

    def poll(self) -> None:
        """Do all that can be done now, and of what is slow the first."""
        slow = self._do_the_quick()
        if slow is not None:
            self._do(slow)

    def _do_the_quick(self) -> _QueuedCommand | None:
        """All that can be done now and is not slow; the first that is."""
        blocked: set[str] = set()
        slow: _QueuedCommand | None = None
        for each in list(self._waiting):
            if each.keys & blocked or not self._is_read(each):
                blocked |= each.keys
            elif each.is_slow:
                blocked |= each.keys
                slow = slow or each
            else:
                self._do(each)
        return slow

    def _do(self, command: _QueuedCommand) -> None:
        self._waiting.remove(command)
        command.do(command.reading.result if command.reading is not None else lambda: None)

    def _is_read(self, each: _QueuedCommand) -> bool:
        if each.reading is None:
            reading = each.prepare()
            if reading is None:
                return True
            each.reading = self._threads.submit(reading)
        return each.reading.done()

    def close(self) -> None:
        """Forget what waits; what is being read is not waited for."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
