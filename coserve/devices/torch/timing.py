"""Times of the sections of a step: on a GPU by its own events, so that nothing waits in between."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch

# Tasklets that may have been launched on a GPU before the first of them is known to be done.
_RUN_AHEAD = 2


class SectionTimer(ABC):
    """Timer of a step, which starts when it is created.

    `mark` ends a section; `sections_s` is read when the device is done with the last one.
    """

    @abstractmethod
    def mark(self) -> None:
        """End a section."""

    @abstractmethod
    def sections_s(self) -> list[float]:
        """Return the seconds of each section."""

    @abstractmethod
    def lap(self) -> Callable[[], float]:
        """Note what the calling thread has given the device so far.

        Returns:
            A function that returns the seconds from the step's start until the device is done with
            that; to be called when it is.
        """

    @abstractmethod
    def elapsed_s(self) -> float:
        """Return the seconds since the step's start, as far as the device has come; it may lag by
        some pieces.
        """


class HostTimer(SectionTimer):
    """Timer for devices on which work is done when a call returns."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def sections_s(self) -> list[float]:
        return [end - start for start, end in pairwise(self._marks)]

    def lap(self) -> Callable[[], float]:
        seconds = self.elapsed_s()
        return lambda: seconds

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._marks[0]


class CudaTimer(SectionTimer):
    """Timer by events in the stream; `elapsed_s` waits for all but the last pieces."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._started_s = device, time.perf_counter()
        self._marks = [self._event(timed=True)]
        self._pieces: deque[torch.cuda.Event] = deque()

    def mark(self) -> None:
        self._marks.append(self._event(timed=True))

    def sections_s(self) -> list[float]:
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._marks)]

    def lap(self) -> Callable[[], float]:
        start, end = self._marks[0], self._event(timed=True)
        return lambda: start.elapsed_time(end) / 1e3

    def elapsed_s(self) -> float:
        self._pieces.append(self._event(timed=False))
        # The host must not launch far ahead, or it would find only late that time is over.
        if len(self._pieces) > _RUN_AHEAD:
            self._pieces.popleft().synchronize()
        return time.perf_counter() - self._started_s

    def _event(self, *, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def section_timer(device: torch.device) -> SectionTimer:
    """Return the timer of a step that starts now."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()
