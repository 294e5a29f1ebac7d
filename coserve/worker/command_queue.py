"""Queue of commands that wait for what threads read for them, without holding up steps.

Commands that share a key (an adapter, a job) run in the order of their arrival; others overtake
them. Slow ones run one at a time, after all others: when an engine starts with many jobs, clients
do not wait for them.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from coserve.errors import CoserveError

# Concurrent reads: a slow one delays only commands with the same keys.
_NUM_THREADS = 4

# Call for a thread before the command itself; None if there is nothing to read.
Reading = Callable[[], Any] | None
# Runs a command, given a call that returns what was read or raises its error. Returns the error
# with which the command was refused, if any.
Do = Callable[[Any, Callable[[], Any]], CoserveError | None]


@dataclass(eq=False)
class QueuedCommand:
    """A command in the queue."""

    command: Any
    """The command itself."""
    keys: frozenset[str]
    """Keys that order it: commands that share one keep their order."""
    prepare: Callable[[], Reading]
    """Called when its turn has come; returns what a thread is to read."""
    label: str
    """Label by which it can be discarded."""
    is_slow: bool
    """Whether `poll` runs at most one such command per call."""
    after: "QueuedCommand | None"
    """Earlier command with the same keys whose error is also this one's."""
    reading: "Future[Any] | None" = None
    """Result of the thread; None while nothing is read."""
    error: CoserveError | None = None
    """Error with which the command was refused, if any."""

    def read(self) -> Any:
        """Return what a thread has read; raise its error, or that of the command in `after`."""
        if self.after is not None and self.after.error is not None:
            raise self.after.error
        return None if self.reading is None else self.reading.result()


class CommandQueue:
    """The queue. Belongs to one thread, which calls `poll` between steps."""

    def __init__(self, do: Do) -> None:
        self._do = do
        self._waiting: list[QueuedCommand] = []
        self._is_doing = self._has_more = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "reader")

    @property
    def is_waiting(self) -> bool:
        """Return whether a command is waiting."""
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
        """Run a command as soon as all earlier ones with one of its keys are done and its files are
        read.

        Args:
            command: Command to run.
            keys: Keys that order it.
            prepare: Called when its turn has come; returns what a thread is to read.
            label: Label by which it can be discarded.
            is_slow: Whether it is left to `poll`, which runs one such command per call.
            after: Earlier command with the same keys whose error is also this one's.
        """
        queued = QueuedCommand(command, frozenset(keys), prepare, label, is_slow, after)
        self._waiting.append(queued)
        self._run_quick()
        return queued

    def discard(self, label: str) -> bool:
        """Remove a waiting command; return whether there was one."""
        kept = [each for each in self._waiting if each.label != label]
        is_found, self._waiting = len(kept) < len(self._waiting), kept
        return is_found

    def poll(self) -> None:
        """Run all commands that can run now, and the first slow one."""
        slow = self._run_quick()
        if slow is not None:
            self._run(slow)

    def _run_quick(self) -> QueuedCommand | None:
        """Run all commands that can run now and are not slow; return the first slow one.

        A command that is put meanwhile runs in its turn.
        """
        # A command may put others while it runs: the call that runs it makes another pass.
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
        # A command that cannot run now holds up all later ones that share a key with it.
        for each in list(self._waiting):
            if each.keys & blocked or not self._is_read(each):
                blocked |= each.keys
            elif each.is_slow:
                # `poll` may run it after this pass: later commands with its keys have to wait.
                blocked |= each.keys
                slow = slow or each
            else:
                self._run(each)
        return slow

    def _run(self, queued: QueuedCommand) -> None:
        self._waiting.remove(queued)
        queued.error = self._do(queued.command, queued.read)

    def _is_read(self, each: QueuedCommand) -> bool:
        if each.reading is None:
            reading = each.prepare()
            # Not kept: a command that still has to wait is prepared again at the next pass.
            if reading is None:
                return True
            each.reading = self._threads.submit(reading)
        return each.reading.done()

    def close(self) -> None:
        """Drop waiting commands; reads that are under way are not awaited."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
