"""What the sections of a step take on a device: on a GPU by its own events, so that nothing waits
in between.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch

# Tasklets that may have been launched on a GPU before the first of them is known to be done.
_RUN_AHEAD = 2


class StepTimer(ABC):
    """Starts with the step. `mark` ends a section; `sections_s` is asked when the device is done
    with the last.
    """

    @abstractmethod
    def mark(self) -> None:
        """A section ends here."""

    @abstractmethod
    def sections_s(self) -> list[float]:
        """Seconds of each section."""

    @abstractmethod
    def lap(self) -> Callable[[], float]:
        """Seconds from the step's start until the device is done with what the calling thread has
        given it; to be asked when it is.
        """

    @abstractmethod
    def elapsed_s(self) -> float:
        """Seconds since the step's start, as far as the device has come with what it was given; it
        may lag by some pieces.
        """


class HostTimer(StepTimer):
    """For devices that do what they are told at once."""

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


class CudaTimer(StepTimer):
    """By events in the stream. `elapsed_s` waits until only the last pieces may be under way."""

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
        if len(self._pieces) > _RUN_AHEAD:
            self._pieces.popleft().synchronize()
        return time.perf_counter() - self._started_s

    def _event(self, *, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def step_timer(device: torch.device) -> StepTimer:
    """The timer of a step that starts now."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()
