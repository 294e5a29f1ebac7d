"""How near to their SLOs requests are by themselves: what jobs must not take.

Invariant 7 asks that SLOs which inference alone can hold are held beside jobs. What inference alone would do is not
seen while jobs run; but it is close to what happened, less the seconds that work of jobs took meanwhile. Each request
that ends adds what it needed in this sense, as a share of its SLO, and a policy has jobs give way as the largest of
these come near 1.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from coserve.scheduling.plan import NeedView, Plan

# Requests that are remembered, and for how long: yesterday's peak says nothing about tonight.
_NUM_REQUESTS, _MEMORY_S = 512, 900.0
# SLOs are promised to 99 of 100.
_QUANTILE = 0.99
# What needed more than this was lost whatever jobs did: one fewer of the 100th that may be. Where more than this share
# was lost, the promise is broken anyway, and is made to the others.
_LOST, _MOST_LOST_SHARE = 1.25, 0.05
# Seconds over which what requests need of the time is averaged, and for which the most of it is remembered.
_MEAN_S, _PEAK_S = 5.0, 60.0
# What a step takes beyond this many times its prediction is the machine's doing: memory that is touched for the first
# time, another process. One such moment says nothing about how near to their SLOs requests are, and would be
# remembered for long, as with few requests the slowest one counts.
_HICCUP = 2.0


class JobsTime:
    """Seconds that work of jobs has taken in all, or the machine in moments of its own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._step = (0.0, 0.0, 0.0)  # the last: its start, its end, what jobs took of it

    def add(self, seconds: float, *, started_s: float, ended_s: float) -> None:
        """A step was run in which jobs took this long."""
        self.seconds += seconds
        self._step = started_s, ended_s, seconds

    def at(self, moment_s: float) -> float:
        """As of a moment in the last step, or after it: who arrives meanwhile waits for the rest of the step."""
        started_s, ended_s, seconds = self._step
        if moment_s >= ended_s:
            return self.seconds
        if moment_s <= started_s:
            return self.seconds - seconds
        return self.seconds - seconds * (ended_s - moment_s) / (ended_s - started_s)


def jobs_seconds(plan: Plan, *, step_s: float, forward_s: float) -> float:
    """What jobs took of a step that took this long, and its forward pass: all but what the requests' rows were
    predicted to take of it on the whole device, or twice that if the machine faltered.
    """
    if not plan.forward_s:
        return step_s - forward_s
    on_whole_s = min(forward_s * plan.forward_speed, _HICCUP * plan.forward_s)
    return step_s - on_whole_s * (1 - plan.window_s / plan.forward_s)


class RecentNeed:
    """Shares of their SLOs that recent requests needed; plain bookkeeping."""

    def __init__(self) -> None:
        self._ttft, self._tpot, self._time = _Recent(), _Recent(), _TimeNeeded()

    def add_first_token(self, now_s: float, share: float) -> None:
        """A request has its first token, for which it needed this share of its TTFT, without what jobs took."""
        self._ttft.add(now_s, share)

    def add_end(self, now_s: float, share: float) -> None:
        """A request has ended that needed this share of its TPOT, without what jobs took."""
        self._tpot.add(now_s, share)

    def add_step(self, plan: Plan, *, forward_s: float, started_s: float, ended_s: float) -> None:
        """A step was run whose forward pass took this long."""
        prefill_s = forward_s * plan.forward_speed * plan.prefill_s / plan.forward_s if plan.forward_s else 0.0
        self._time.add(started_s, ended_s, plan.decode_share * (ended_s - started_s) + prefill_s)

    def view(self, now_s: float) -> NeedView:
        """What 99 of 100 recent requests needed at most, and how many needed more than there was."""
        ttft, tpot = self._ttft.at(now_s), self._tpot.at(now_s)
        return NeedView(ttft.quantile, tpot.quantile, ttft.late_share + tpot.late_share, self._time.peak(now_s))


class _Summary(NamedTuple):
    """Of recent values: what 99 of 100 stay within, and the share of those above 1."""

    quantile: float = 0.0
    late_share: float = 0.0


class _TimeNeeded:
    """The largest mean over some seconds of the share of the time that requests needed."""

    def __init__(self) -> None:
        self._since_s, self._needed_s = 0.0, 0.0
        self._means: deque[tuple[float, float]] = deque()

    def add(self, started_s: float, ended_s: float, needed_s: float) -> None:
        if started_s - self._since_s > _PEAK_S:  # it was idle for long
            self._since_s, self._needed_s = started_s, 0.0
        self._needed_s += needed_s
        if ended_s - self._since_s >= _MEAN_S:
            self._means.append((ended_s, self._needed_s / (ended_s - self._since_s)))
            self._since_s, self._needed_s = ended_s, 0.0

    def peak(self, now_s: float) -> float:
        while self._means and self._means[0][0] < now_s - _PEAK_S:
            self._means.popleft()
        return max([mean for _, mean in self._means], default=0.0)


class _Recent:
    """Values of recent requests, and their summary."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_REQUESTS)
        self._summary: _Summary | None = _Summary()  # None: to be worked out

    def add(self, now_s: float, share: float) -> None:
        self._recent.append((now_s, share))
        self._summary = None

    def at(self, now_s: float) -> _Summary:
        while self._recent and self._recent[0][0] < now_s - _MEMORY_S:
            self._recent.popleft()
            self._summary = None
        if self._summary is None:
            self._summary = _summary(sorted([share for _, share in self._recent]))
        return self._summary


def _summary(shares: Sequence[float]) -> _Summary:
    """Of sorted values."""
    num_held = bisect_right(shares, _LOST)
    if not num_held:
        return _Summary()
    num_lost = len(shares) - num_held
    counted = num_held if num_lost > _MOST_LOST_SHARE * len(shares) else len(shares)
    index = min(num_held - 1, int(_QUANTILE * (counted - 1) + 0.5))
    return _Summary(shares[index], 1 - bisect_right(shares, 1.0) / len(shares))
