"""Commands that wait for what threads read for them, without holding up steps: each is done in its
turn.

Commands that share a key (an adapter, a job) are done in the order in which they came; others pass
them. Slow ones come one at a time, after all others: when an engine begins with many jobs, those
who ask it something do not wait for them.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from coserve.errors import CoserveError

# Reads beside each other: a slow one holds up only those that want the same.
_NUM_THREADS = 4

# What a thread is to do before the command itself, or None if there is nothing to read.
Reading = Callable[[], Any] | None
# Does a command; takes a call that returns what was read, or raises what went wrong. Returns what
# it was refused for.
Do = Callable[[Any, Callable[[], Any]], CoserveError | None]


@dataclass(eq=False)
class QueuedCommand:
    """A command in its place."""

    command: Any
    keys: frozenset[str]
    prepare: Callable[[], Reading]
    label: str
    is_slow: bool
    after: "QueuedCommand | None"
    reading: "Future[Any] | None" = None
    error: CoserveError | None = None
    """What it was refused for, once it was done."""

    def read(self) -> Any:
        """Return what was read for it; raises what went wrong, with that or with the command that
        it comes after.
        """
        if self.after is not None and self.after.error is not None:
            raise self.after.error
        return None if self.reading is None else self.reading.result()


class CommandQueue:
    """Belongs to one thread, which calls `poll` between steps."""

    def __init__(self, do: Do) -> None:
        self._do = do
        self._waiting: list[QueuedCommand] = []
        self._is_doing = self._has_more = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "reader")

    @property
    def is_waiting(self) -> bool:
        """Whether there is a command that could not be done yet."""
        return bool(self._waiting)

    def put(
        self,
        command: Any,
        keys: Collection[str],
        prepare: Callable[[], Reading] = lambda: None,
        *,
        label: str = "",
        is_slow: bool = False,
        after: QueuedCommand | None = None,
    ) -> QueuedCommand:
        """Do a command as soon as all earlier ones with one of its keys are done, and what it needs
        has been read.

        Args:
            prepare: called when its turn has come; returns what a thread is to read.
            label: to discard it by.
            is_slow: it is left to `poll`, which does one such.
            after: one that came before it with the same keys, without which it is refused.
        """
        queued = QueuedCommand(command, frozenset(keys), prepare, label, is_slow, after)
        self._waiting.append(queued)
        self._do_the_quick()
        return queued

    def discard(self, label: str) -> bool:
        """Forget a command that has not been done; returns whether there was one."""
        kept = [each for each in self._waiting if each.label != label]
        found, self._waiting = len(kept) < len(self._waiting), kept
        return found

    def poll(self) -> None:
        """Do all that can be done now, and of what is slow the first."""
        slow = self._do_the_quick()
        if slow is not None:
            self._do_now(slow)

    def _do_the_quick(self) -> QueuedCommand | None:
        """All that can be done now and is not slow; the first that is. What is put meanwhile is
        done in its turn.
        """
        self._has_more = True
        if self._is_doing:
            return None
        slow: QueuedCommand | None = None
        self._is_doing = True
        try:
            while self._has_more:
                self._has_more = False
                slow = self._pass()
        finally:
            self._is_doing = False
        return slow

    def _pass(self) -> QueuedCommand | None:
        blocked: set[str] = set()
        slow: QueuedCommand | None = None
        for each in list(self._waiting):
            if each.keys & blocked or not self._is_read(each):
                blocked |= each.keys
            elif each.is_slow:
                blocked |= each.keys
                slow = slow or each
            else:
                self._do_now(each)
        return slow

    def _do_now(self, queued: QueuedCommand) -> None:
        self._waiting.remove(queued)
        queued.error = self._do(queued.command, queued.read)

    def _is_read(self, each: QueuedCommand) -> bool:
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
