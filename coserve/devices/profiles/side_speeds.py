"""Speeds of the sides of a divided device, measured at the start in a second or two.

In the two stages of `coserve.scheduling.sharing`: each side alone on some units beside the same on
all units, in turns, so that whatever else the machine does meets both; then both sides at once.
"""

import time
from collections.abc import Callable, Generator, Iterator
from statistics import median
from threading import Event

import torch

from coserve.devices.profiles.stopwatch import Timing
from coserve.devices.sides.base import Sides
from coserve.scheduling.plan import Partition
from coserve.scheduling.sharing import Share, Sharing, Side
from coserve.tuning.training_pass import TrainingPass

_ROWS, _RIDING_ROWS = (1, 32), 4
# Numbers of units whose speeds are measured, as shares of all.
_SHARES = (0.25, 0.5, 0.75)
_RUNS, _MIN_TASKLETS = 3, 8
# A CPU's tasklets have some rows and are timed one by one; a GPU is given those of a whole pass, of
# more rows, before anything is waited for, after some passes in which they are captured.
_TASKLET_ROWS, _GPU_TASKLET_ROWS = 128, 512
_GPU_WARM_UPS = 3
# Forward passes beside tasklets that are timed as one, so that a GPU does not wait for the host
# between them.
_GPU_FORWARDS = 4

Forward = Callable[[int], Callable[[], None]]


def measure_sharing(
    sides: Sides, device: torch.device, forward: Forward, ready_pass: Callable[[int], TrainingPass]
) -> Generator[None, None, Sharing]:
    """Measure the sides of a device with two units at least, piece by piece.

    Args:
        sides: The sides.
        device: The device.
        forward: Returns a forward pass of as many rows of a request, to be run any number of times.
        ready_pass: Returns a pass of as many rows that is to go backward.
    """
    return _SideMeasurement(sides, device, forward, ready_pass).sharing()


class _SideMeasurement:
    """Measurement of the sides of a device; see `measure_sharing`."""

    def __init__(
        self,
        sides: Sides,
        device: torch.device,
        forward: Forward,
        ready_pass: Callable[[int], TrainingPass],
    ) -> None:
        self._sides = sides
        self._device = device
        self._forward = forward
        self._ready_pass = ready_pass
        self._num_units, self._is_gpu = sides.num_units, device.type == "cuda"
        self._rows = _GPU_TASKLET_ROWS if self._is_gpu else _TASKLET_ROWS
        self._num_warm_ups = _GPU_WARM_UPS if self._is_gpu else 0
        self._num_pieces = self._num_warm_ups + (_RUNS if self._is_gpu else _MIN_TASKLETS)

    def sharing(self) -> Generator[None, None, Sharing]:
        num_units, shares = self._num_units, []
        for units in sorted({max(1, int(share * num_units)) for share in _SHARES}):
            backward = yield from self._tasklets_speed(units)
            alone: dict[int, float] = {}
            for rows in _ROWS:
                alone[rows] = yield from self._forward_speed(units, self._forward(rows))
            forward = tuple(alone.values())
            shares.append(
                Share(units=units, rows=_ROWS, forward=forward, backward=(backward,) * len(_ROWS))
            )
        half = max(1, num_units // 2)
        forward_longer, backward_longer = yield from self._beside_alone(
            half, self._forward(_RIDING_ROWS)
        )
        return Sharing(
            num_units=num_units,
            shares=tuple(shares),
            forward_interference=max(0.0, forward_longer - 1) * num_units / (num_units - half),
            backward_interference=max(0.0, backward_longer - 1) * num_units / half,
            # Calls are captured anew for each part: on an H200 jobs lost a tenth by that, and few
            # steps gained (benchmarks/gpu.md).
            pays=not self._is_gpu,
        )

    def _forward_speed(self, units: int, run: Callable[[], None]) -> Timing:
        """Measure the speed of the forward pass on some units, as a share of that on all."""
        found: dict[int, list[float]] = {self._num_units: [], units: []}
        for _ in range(_RUNS + 1 + self._num_warm_ups):
            for number, seconds in found.items():
                seconds.append(self._alone_s("forward", number, run))
                yield
        return min(
            1.0, median(found[self._num_units][1:]) / median(found[units][1 + self._num_warm_ups :])
        )

    def _tasklets_speed(self, units: int) -> Timing:
        """Measure the same of tasklets, of which each pass has one for every block."""
        seconds: dict[int, list[float]] = {self._num_units: [], units: []}
        while len(seconds[units]) < self._num_pieces:
            for piece in self._pieces(self._ready_pass(self._rows)):
                number = (
                    self._num_units
                    if len(seconds[self._num_units]) <= len(seconds[units])
                    else units
                )
                seconds[number].append(self._alone_s("backward", number, piece))
                yield
        whole_s, part_s = (
            median(seconds[number][self._num_warm_ups :]) for number in (self._num_units, units)
        )
        return min(1.0, whole_s / part_s)

    def _beside_alone(
        self, half: int, run: Callable[[], None]
    ) -> Generator[None, None, tuple[float, float]]:
        """Measure how many times as long a forward pass, and tasklets, take on their units beside
        the other side as alone there.
        """
        rest, over, run = self._num_units - half, Event(), self._several(run)
        number = 2 * _RUNS if self._is_gpu else 1
        alone_s: list[float] = []
        for _ in range(self._num_warm_ups + _RUNS):
            alone_s.append(self._alone_s("forward", half, run))
            yield
        tasklet_alone_s: list[float] = []
        for _ in range(number):
            for piece in self._pieces(self._ready_pass(self._rows)):
                tasklet_alone_s.append(self._alone_s("backward", rest, piece))
                yield
        forward_s: list[float] = []
        tasklet_s: list[float] = []
        passes = [self._ready_pass(self._rows) for _ in range(number)]

        def work(has_ended: Callable[[], bool]) -> None:
            try:
                tasklet_s.extend(
                    self._timed(piece) for training in passes for piece in self._pieces(training)
                )
            finally:
                over.set()

        with self._sides.running(work, Partition(half, rest)):
            while not forward_s or not over.is_set():
                forward_s.append(self._timed(run))
        alone_s = alone_s[self._num_warm_ups :]
        tasklet_alone_s = tasklet_alone_s[self._num_warm_ups :]
        return median(forward_s) / median(alone_s), median(tasklet_s) / median(tasklet_alone_s)

    def _several(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what is timed as one piece where the device would wait for the host otherwise."""

        def run_all() -> None:
            for _ in range(_GPU_FORWARDS if self._is_gpu else 1):
                run()

        return run_all

    def _pieces(self, training: TrainingPass) -> Iterator[Callable[[], None]]:
        """Yield the pieces of a pass that are timed, each to be run before the next one."""
        while not training.done:
            yield lambda: self._run_pieces(training)

    def _run_pieces(self, training: TrainingPass) -> None:
        training.run_tasklet(self._rows)
        while self._is_gpu and not training.done:
            training.run_tasklet(self._rows)

    def _alone_s(self, side: Side, units: int, run: Callable[[], None]) -> float:
        """Return the seconds of a run on some units of a side."""
        with self._sides.alone(side, units):
            return self._timed(run)

    def _timed(self, run: Callable[[], None]) -> float:
        self._wait()
        start_s = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start_s

    def _wait(self) -> None:
        """Wait for what the calling thread has given the device."""
        if self._is_gpu:
            torch.cuda.current_stream(self._device).synchronize()
