"""How fast the sides of a divided CPU are, measured at the start in a second or two.

In the two stages of `coserve.scheduling.sharing`: each side alone on some threads beside the same on all threads, in
turns, so that whatever else the machine does meets both; then both sides at once.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from threading import Event

import torch

from coserve.devices.beside import Beside
from coserve.scheduling.sharing import Share, Sharing
from coserve.tuning.training_pass import TrainingPass

_ROWS, _TASKLET_ROWS, _RIDING_ROWS = (1, 32), 128, 4
# Numbers of threads whose speeds are measured, as shares of all.
_SHARES = (0.25, 0.5, 0.75)
_RUNS, _LEAST_TASKLETS = 3, 8

Forward = Callable[[int], Callable[[], None]]


def measure_sharing(num_threads: int, forward: Forward, ready_pass: Callable[[int], TrainingPass]) -> Sharing:
    """Measure; at least two threads.

    Args:
        forward: a forward pass of as many rows of a request, to be run any number of times.
        ready_pass: a pass of as many rows that is to go backward.
    """
    shares = []
    for threads in sorted({max(1, int(share * num_threads)) for share in _SHARES}):
        backward = _tasklets_speed(num_threads, threads, ready_pass)
        alone = tuple([_forward_speed(num_threads, threads, forward(rows)) for rows in _ROWS])
        shares.append(Share(units=threads, rows=_ROWS, forward=alone, backward=(backward,) * len(_ROWS)))
    half = max(1, num_threads // 2)
    forward_longer, backward_longer = _beside_alone(num_threads, half, forward(_RIDING_ROWS), ready_pass)
    return Sharing(
        num_units=num_threads,
        shares=tuple(shares),
        forward_interference=max(0.0, forward_longer - 1) * num_threads / (num_threads - half),
        backward_interference=max(0.0, backward_longer - 1) * num_threads / half,
    )


def _forward_speed(num_threads: int, threads: int, run: Callable[[], None]) -> float:
    """On some threads, as a share of that on all."""
    found: dict[int, list[float]] = {num_threads: [], threads: []}
    for _ in range(_RUNS + 1):
        for number, seconds in found.items():
            seconds.append(_with_threads(number, run))
    return min(1.0, median(found[num_threads][1:]) / median(found[threads][1:]))


def _tasklets_speed(num_threads: int, threads: int, ready_pass: Callable[[int], TrainingPass]) -> float:
    """The same of tasklets, of which each pass has one for every block."""
    found: dict[int, list[float]] = {num_threads: [], threads: []}
    while len(found[threads]) < _LEAST_TASKLETS:
        for piece in _tasklets(ready_pass(_TASKLET_ROWS)):
            number = num_threads if len(found[num_threads]) <= len(found[threads]) else threads
            found[number].append(_with_threads(number, piece))
    return min(1.0, median(found[num_threads]) / median(found[threads]))


def _beside_alone(
    num_threads: int, half: int, run: Callable[[], None], ready_pass: Callable[[int], TrainingPass]
) -> tuple[float, float]:
    """How many times as long a forward pass, and tasklets, take on their threads beside the other as alone there."""
    rest = num_threads - half
    alone_s = [_with_threads(half, run) for _ in range(_RUNS)]
    tasklet_alone_s = [_with_threads(rest, piece) for piece in _tasklets(ready_pass(_TASKLET_ROWS))]
    forward_s: list[float] = []
    tasklet_s: list[float] = []
    training, over, beside = ready_pass(_TASKLET_ROWS), Event(), Beside()

    def work(has_ended: Callable[[], bool]) -> None:
        try:
            tasklet_s.extend(_timed(piece) for piece in _tasklets(training))
        finally:
            over.set()

    try:
        with beside.running(work, threads=rest, own_threads=half):
            while not forward_s or not over.is_set():
                forward_s.append(_timed(run))
    finally:
        beside.close()
    return median(forward_s) / median(alone_s), median(tasklet_s) / median(tasklet_alone_s)


def _tasklets(training: TrainingPass) -> Iterator[Callable[[], None]]:
    """One after the other, each to be run before the next."""
    while not training.done:
        yield lambda: training.run_tasklet(_TASKLET_ROWS)


def _with_threads(threads: int, run: Callable[[], None]) -> float:
    """Seconds of a run on some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _timed(run)
    finally:
        torch.set_num_threads(before)


def _timed(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
