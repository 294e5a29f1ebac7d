"""Timing of a piece of work, such that two starts on one machine measure the same.

A piece that is slow by accident (the first touch of a page of weights, a product that is compiled
at its first use, another process) is told from a slow one: it is run until its two fastest runs
agree. A short time stays a short time whatever else happens, so the fastest runs are believed, and
a curve never falls.
"""

from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from coserve.kernels.groups.base import RankGroup

# Two fastest runs agree if they are this near; how many runs there are at least and at most, and
# seconds of all.
_AGREE, _MIN_RUNS, _MAX_RUNS, _MAX_S = 0.03, 3, 25, 1.5
# Warming up ends when a run is no faster than the one before, by more than this; or after this
# long.
_WARM, _WARM_UP_S = 0.1, 4.0


T = TypeVar("T")
# A measurement that is under way, and returns seconds.
Timing = Generator[None, None, float]


def shared_clock(time_s: Callable[[], float], group: RankGroup) -> Callable[[], float]:
    """Return a clock that shows the same on all ranks of a group: rank 0's, once all ranks are
    there.

    Loops that end by the clock then end alike on all ranks, and a piece has taken as long as the
    slowest rank took.

    Args:
        time_s: this rank's clock; itself the result where there is one rank.
        group: the ranks, all of which read the clock at the same places.
    """
    if group.size == 1:
        return time_s

    def agreed_s() -> float:
        own_s = time_s()  # waits for the device, too
        group.barrier()
        if group.rank == 0:
            own_s = time_s()
        return group.agree(int(own_s * 1e9)) / 1e9

    return agreed_s


def finish(measurement: Generator[None, None, T]) -> T:
    """Run a measurement to its end, and return its result."""
    while True:
        try:
            next(measurement)
        except StopIteration as ended:
            result: T = ended.value
            return result


class Stopwatch:
    """A clock with ways to time a piece of work over several runs."""

    def __init__(
        self, time_s: Callable[[], float], *, num_uncounted: int = 1, max_runs: int = _MAX_RUNS
    ) -> None:
        """Set the clock.

        Args:
            time_s: Returns the seconds now, once the device has finished what it was given.
            num_uncounted: Number of a piece's first runs that do not count: where calls are
                captured, the second is the one in which they are.
            max_runs: Most counted runs of a piece.
        """
        self._time_s, self.num_uncounted, self._max_runs = time_s, num_uncounted, max_runs

    def now_s(self) -> float:
        """Return what the clock shows."""
        return self._time_s()

    def once_s(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        start_s = self._time_s()
        run()
        return self._time_s() - start_s

    def warm_up(self, run: Callable[[], object]) -> Generator[None, None, None]:
        """Run until it gets no faster."""
        last_s = spent_s = self.once_s(run)
        while spent_s < _WARM_UP_S:
            yield
            seconds = self.once_s(run)
            spent_s += seconds
            if last_s <= seconds * (1 + _WARM):
                return
            last_s = seconds

    def fastest_s(self, run: Callable[[], object]) -> Timing:
        """Return the seconds of one run, after the runs that are not counted."""
        for _ in range(self.num_uncounted):
            self.once_s(run)
            yield

        def measure() -> Timing:
            yield
            return self.once_s(run)

        return (yield from self.stable_s(measure))

    def stable_s(self, measure: Callable[[], Timing]) -> Timing:
        """Return the mean of the two fastest of some measurements, as soon as they agree.

        Each may take longer than what it measures: the time for all of them counts.
        """
        spent_s = 0.0
        fastest: list[float] = []
        while len(fastest) < self._max_runs:
            seconds, own_s = yield from self._with_own_time(measure())
            fastest.append(seconds)
            spent_s += own_s
            fastest.sort()
            if spent_s > _MAX_S:
                break
            if len(fastest) >= _MIN_RUNS and fastest[1] <= fastest[0] * (1 + _AGREE):
                break
        return sum(fastest[:2]) / len(fastest[:2])

    def _with_own_time(self, measurement: Timing) -> Generator[None, None, tuple[float, float]]:
        """Return a measurement's result and how long it took, without what ran while it had
        yielded.
        """
        own_s = 0.0
        while True:
            start_s = self._time_s()
            try:
                next(measurement)
            except StopIteration as ended:
                return ended.value, own_s + self._time_s() - start_s
            own_s += self._time_s() - start_s
            yield


def rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return seconds by rows without outliers: more rows take no less, so what lies above a later
    point was held up.
    """
    kept: dict[int, float] = {}
    least = float("inf")
    for rows in sorted(seconds, reverse=True):
        least = min(least, seconds[rows])
        kept[rows] = least
    return dict(sorted(kept.items()))
