"""How near to their SLOs requests are by themselves: what jobs must not take.

Invariant 7 asks that SLOs which inference alone can hold are held beside jobs. What inference alone would do is not
seen while jobs run; but it is close to what happened, less the seconds that work of jobs took meanwhile. Each request
that ends adds what it needed in this sense, as a share of its SLO, and a policy has jobs give way as the largest of
these come near 1.
"""

from collections import deque

from coserve.scheduling.plan import NeedView, Plan

# Requests that are remembered, and for how long: yesterday's peak says nothing about tonight.
_NUM_REQUESTS, _MEMORY_S = 512, 900.0
# SLOs are promised to 99 of 100.
_QUANTILE = 0.99
# What needed more than this was lost whatever jobs did, and is no reason for them to stop.
_LOST = 1.25


class JobsTime:
    """Seconds that work of jobs has taken in all."""

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
        return self.seconds - seconds * min(1.0, (ended_s - moment_s) / (ended_s - started_s))


def jobs_seconds(plan: Plan, *, forward_s: float, loss_s: float, backward_s: float, update_s: float) -> float:
    """What jobs took of a step whose sections took this long: of the forward pass, the share that windows were
    predicted to add.
    """
    windows_s = forward_s * plan.window_s / plan.forward_s if plan.forward_s else 0.0
    return windows_s + loss_s + backward_s + update_s


class RecentNeed:
    """Shares of their SLOs that recent requests needed; plain bookkeeping."""

    def __init__(self) -> None:
        self._ttft, self._tpot = _Recent(), _Recent()

    def add_first_token(self, now_s: float, share: float) -> None:
        """A request has its first token, for which it needed this share of its TTFT, without what jobs took."""
        self._ttft.add(now_s, share)

    def add_end(self, now_s: float, share: float) -> None:
        """A request has ended that needed this share of its TPOT, without what jobs took."""
        self._tpot.add(now_s, share)

    def view(self, now_s: float) -> NeedView:
        """What 99 of 100 recent requests needed at most."""
        return NeedView(self._ttft.quantile(now_s), self._tpot.quantile(now_s))


class _Recent:
    """A quantile over recent values."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_REQUESTS)
        self._quantile: float | None = 0.0  # None: to be worked out

    def add(self, now_s: float, share: float) -> None:
        self._recent.append((now_s, share))
        self._quantile = None

    def quantile(self, now_s: float) -> float:
        while self._recent and self._recent[0][0] < now_s - _MEMORY_S:
            self._recent.popleft()
            self._quantile = None
        if self._quantile is None:
            held = sorted([share for _, share in self._recent if share <= _LOST])
            self._quantile = held[int(_QUANTILE * (len(held) - 1) + 0.5)] if held else 0.0
        return self._quantile
