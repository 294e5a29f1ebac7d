"""The SLO headroom of recent requests: how near to their SLOs they come by themselves, which jobs
must not use up.

Invariant 7 requires that SLOs which inference alone can hold are held beside jobs. How inference
alone would fare cannot be observed while jobs run; but it is close to what happened, less the
seconds that work of jobs took meanwhile. Each request that ends adds what it used in this sense, as
a share of its SLO, and a policy has jobs give way as the largest of these come near 1.

What requests use is remembered for long, and with few of them the slowest one counts. So it is
remembered in seconds of the profile, and read as what it would be at the present speed of the
device: a minute in which another process had the machine, or the first prompt of a process, says
nothing about the minutes after it.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import exp
from typing import NamedTuple

from coserve.scheduling.plan import Plan, SloUse
from coserve.scheduling.slo.taken_time import Taken, profiled_s

# Requests that are remembered, and for how long: yesterday's peak says nothing about tonight.
_NUM_REQUESTS, _MEMORY_S = 512, 900.0
# SLOs are promised to 99 of 100.
_QUANTILE = 0.99
# What 99 of 100 use is known from this many requests on, or once they have been watched for this
# many seconds.
_KNOWN_REQUESTS, _KNOWN_S = 256, 120.0
# A request that used more than this was infeasible whatever jobs did, and counts among the 1 in 100
# that may be late. Beyond this share of them the promise is broken, and only made to the others.
_INFEASIBLE, _MAX_INFEASIBLE_SHARE = 1.25, 0.05
# Seconds over which what requests use of the time is averaged, and for which the most of it is
# remembered.
_MEAN_S, _PEAK_S = 5.0, 60.0
# Seconds after which a step weighs a third of what it did in the device's speed of now; and how
# much slower than it one step can make it.
_SPEED_S, _MAX_SLOWER = 10.0, 2.0
# A clock that stands still while a step runs says nothing about the device.
_MIN_SLOWNESS = 0.01


class SloHeadroom:
    """A record of the shares of their SLOs that recent requests used by themselves."""

    def __init__(self) -> None:
        self._ttft, self._tpot, self._time, self._speed = (
            _Recent(),
            _Recent(),
            _TimeUsed(),
            _Slowness(),
        )

    def add_first_token(self, now_s: float, share: float) -> None:
        """Record the share of its TTFT that a request used for its first token, less what was
        taken.
        """
        self._ttft.add(now_s, share)

    def add_end(self, now_s: float, share: float) -> None:
        """Record the share of its TPOT that an ended request used, less what was taken."""
        self._tpot.add(now_s, share)

    def add_step(self, plan: Plan, taken: Taken, *, started_s: float, ended_s: float) -> None:
        """Record a step and what was taken of it."""
        planned = plan.prediction
        # A step without rows is no measure of requests.
        if not planned.forward_s:
            return
        own_s, seconds = profiled_s(planned), ended_s - started_s
        # The sum is the measured time of the rows: `machine_s` is what exceeds the profile.
        self._speed.add(own_s, own_s + taken.machine_s, seconds)
        # Time that requests need of so many seconds at the pace of their SLOs, by the profile.
        used_s = (planned.decode_share * seconds + planned.prefill_s) / planned.forward_correction
        self._time.add(started_s, ended_s, used_s)

    def use(self, now_s: float) -> SloUse:
        """Return the shares that 99 of 100 recent requests used at most, and the share of those
        that used more than there was.
        """
        slowness = self._speed.now
        ttft, tpot = self._ttft.at(now_s, slowness), self._tpot.at(now_s, slowness)
        return SloUse(
            ttft=ttft.quantile,
            tpot=tpot.quantile,
            late_share=ttft.late_share + tpot.late_share,
            time=slowness * self._time.peak(now_s),
            known=self._tpot.known(now_s),
        )


class _Slowness:
    """The present ratio of the times of forward passes to those of the profile."""

    def __init__(self) -> None:
        self.now = 1.0
        self._profiled_s = self._measured_s = 0.0

    def add(self, profiled_s: float, measured_s: float, seconds: float) -> None:
        """Record rows of requests in a step that took `seconds` in all."""
        left = exp(-seconds / _SPEED_S)
        self._profiled_s = left * self._profiled_s + profiled_s
        self._measured_s = left * self._measured_s + min(
            measured_s, _MAX_SLOWER * self.now * profiled_s
        )
        if self._profiled_s > 0:
            self.now = max(_MIN_SLOWNESS, self._measured_s / self._profiled_s)


class _Summary(NamedTuple):
    """A summary of recent values."""

    quantile: float = 0.0
    """Value within which 99 of 100 stay."""
    late_share: float = 0.0
    """Share of the values above 1."""


_NOTHING_KNOWN = _Summary()


class _TimeUsed:
    """The share of the time that requests used: the largest of its averages over some seconds."""

    def __init__(self) -> None:
        self._since_s, self._used_s = 0.0, 0.0
        self._means: deque[tuple[float, float]] = deque()
        self._peak = 0.0  # of these

    def add(self, started_s: float, ended_s: float, used_s: float) -> None:
        if started_s - self._since_s > _PEAK_S:  # it was idle for long
            self._since_s, self._used_s = started_s, 0.0
        self._used_s += used_s
        if ended_s - self._since_s >= _MEAN_S:
            self._means.append((ended_s, self._used_s / (ended_s - self._since_s)))
            self._since_s, self._used_s = ended_s, 0.0
            self._peak = max(self._peak, self._means[-1][1])

    def peak(self, now_s: float) -> float:
        while self._means and self._means[0][0] < now_s - _PEAK_S:
            self._means.popleft()
            self._peak = max([mean for _, mean in self._means], default=0.0)
        return self._peak


class _Recent:
    """Values of recent requests, in the order of arrival and sorted, and their summary."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []
        # The last factor asked for, and the summary of the values multiplied by it.
        self._summary: tuple[float, _Summary] | None = None

    def add(self, now_s: float, share: float) -> None:
        self._summary = None
        if len(self._recent) == _NUM_REQUESTS:
            self._forget_first()
        self._recent.append((now_s, share))
        insort(self._sorted, share)

    def at(self, now_s: float, times: float) -> _Summary:
        """Return the summary of the values multiplied by a number."""
        while self._recent and self._recent[0][0] < now_s - _MEMORY_S:
            self._forget_first()
        if self._summary is None or self._summary[0] != times:
            self._summary = times, self._summarize(times)
        return self._summary[1]

    def known(self, now_s: float) -> float:
        """Return how well the values tell the 99th percentile, from 0 to 1."""
        if not self._recent:
            return 0.0
        watched_s = now_s - self._recent[0][0]
        return min(1.0, max(len(self._recent) / _KNOWN_REQUESTS, watched_s / _KNOWN_S))

    def _summarize(self, times: float) -> _Summary:
        # The values stay as they are; limits are divided by the factor instead.
        shares, most = self._sorted, _INFEASIBLE / times
        # Even the fastest request was infeasible: nothing is known of feasible ones.
        if not shares or shares[0] > most:
            return _NOTHING_KNOWN
        num_held, num_all = len(shares), len(shares)
        if shares[-1] > most:
            num_held = bisect_right(shares, most)
        # Few infeasible requests count among those that may be late; many are left out.
        counted = num_held if num_all - num_held > _MAX_INFEASIBLE_SHARE * num_all else num_all
        index = min(num_held - 1, int(_QUANTILE * (counted - 1) + 0.5))
        return _Summary(times * shares[index], 1 - bisect_right(shares, 1 / times) / num_all)

    def _forget_first(self) -> None:
        self._summary = None
        _, share = self._recent.popleft()
        del self._sorted[bisect_left(self._sorted, share)]
