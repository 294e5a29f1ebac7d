"""Seconds of a piece of work, so that two starts on one machine find the same.

What is slow by accident (the first touch of a page of weights, a product that is compiled at its first use, another
process) is told from what is slow: a piece is run until its two fastest runs agree. A short time stays a short time
whatever else happens, so the fastest runs are believed, and a curve never falls.
"""

from collections.abc import Callable, Mapping

# Two fastest runs agree if they are this near; how many runs there are at least and at most, and seconds of all.
_AGREE, _LEAST_RUNS, _MOST_RUNS, _MOST_S = 0.03, 3, 25, 1.5
# Warming up ends when a run is no faster than the one before, by more than this; or after this long.
_WARM, _WARM_UP_S = 0.1, 4.0


class Stopwatch:
    """Measures by a clock. Each verb runs a piece some times."""

    def __init__(self, time_s: Callable[[], float], *, num_uncounted: int = 1) -> None:
        """time_s: the clock, once the device is done with what it was given. num_uncounted: first runs of a piece that
        are not counted: where calls are captured, the second is the one in which they are.
        """
        self._time_s, self.num_uncounted = time_s, num_uncounted

    def now_s(self) -> float:
        """What the clock shows."""
        return self._time_s()

    def once_s(self, run: Callable[[], object]) -> float:
        """Seconds of one run."""
        start_s = self._time_s()
        run()
        return self._time_s() - start_s

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run until it gets no faster."""
        last_s = spent_s = self.once_s(run)
        while spent_s < _WARM_UP_S:
            seconds = self.once_s(run)
            spent_s += seconds
            if last_s <= seconds * (1 + _WARM):
                return
            last_s = seconds

    def fastest_s(self, run: Callable[[], object]) -> float:
        """Seconds of one run, after those that are not counted."""
        for _ in range(self.num_uncounted):
            self.once_s(run)
        return self.stable_s(lambda: self.once_s(run))

    def stable_s(self, measure: Callable[[], float]) -> float:
        """The mean of the two fastest of some measurements, as soon as they agree.

        Each may take longer than what it measures: the time for all of them counts.
        """
        start_s = self._time_s()
        found: list[float] = []
        while len(found) < _MOST_RUNS:
            found.append(measure())
            found.sort()
            if self._time_s() - start_s > _MOST_S:
                break
            if len(found) >= _LEAST_RUNS and found[1] <= found[0] * (1 + _AGREE):
                break
        return sum(found[:2]) / len(found[:2])


def rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds by rows without outliers: more rows take no less, so what is above a later point was held up."""
    found: dict[int, float] = {}
    least = float("inf")
    for rows in sorted(seconds, reverse=True):
        least = min(least, seconds[rows])
        found[rows] = least
    return dict(sorted(found.items()))
