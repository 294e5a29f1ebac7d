"""A view of a server's start: bars on a terminal, otherwise lines of the log."""

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

_log = logging.getLogger("coserve.start")

# Seconds between two lines about one stage.
_BETWEEN_LINES_S = 2.0


class StartBars:
    """A bar for each stage, on a terminal; they are removed when the start is over."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from coserve.cli.tables import console

        self._bars = Progress(
            *(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()),
            console=console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "StartBars":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()

    def show(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Show the progress of a stage; the stages before it are over.

        Args:
            stage: Name of the stage.
            done: Finished part.
            total: The whole; 0 if it is not known.
        """
        if stage not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, total=1, completed=1)
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


class StartLines:
    """A line for each stage and some within it, for a log: its readers see what takes the time.

    Written at every log level except error.
    """

    def __init__(self, log_level: str, *, time_s: Callable[[], float] = time.monotonic) -> None:
        _log.setLevel(logging.ERROR if log_level == "error" else logging.INFO)
        self._time_s = time_s
        self._start_s = self._last_s = time_s()
        self._stage = ""

    def __enter__(self) -> "StartLines":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: lines are complete."""

    def show(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Write the progress of a stage, if it is a new one or some seconds have passed.

        Args:
            stage: Name of the stage.
            done: Finished part.
            total: The whole; 0 if it is not known.
        """
        now_s = self._time_s()
        if stage == self._stage and now_s - self._last_s < _BETWEEN_LINES_S:
            return
        self._stage, self._last_s = stage, now_s
        _log.info(
            "%s%s (%.1f s)", stage, f", {done} of {total}" if total else "", now_s - self._start_s
        )


def start_view(log_level: str) -> StartBars | StartLines:
    """Return the view that fits stderr."""
    return StartBars() if sys.stderr.isatty() else StartLines(log_level)
