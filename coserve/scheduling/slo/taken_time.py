"""The time of requests that something else took: work of jobs, or a device that is slower than its
profile says.
"""

from typing import NamedTuple

from coserve.scheduling.plan import Plan, Prediction


class Taken(NamedTuple):
    """Seconds that requests did not need themselves. jobs_s: work of jobs took them. machine_s:
    rows of requests took them beyond what the profile says (below 0: they took less).
    """

    jobs_s: float = 0.0
    machine_s: float = 0.0

    def since(self, earlier: "Taken", share: float = 1.0) -> "Taken":
        """What was taken since an earlier moment, or a share of it."""
        jobs_s, machine_s = self.jobs_s - earlier.jobs_s, self.machine_s - earlier.machine_s
        return Taken(share * jobs_s, share * machine_s)


class TakenTime:
    """What has been taken of an engine's time in all."""

    def __init__(self) -> None:
        self.total = Taken()
        self._step = (0.0, 0.0, Taken())  # the last: its start, its end, the total before it

    def add(self, taken: Taken, *, started_s: float, ended_s: float) -> None:
        """A step was run in which this was taken."""
        self._step = started_s, ended_s, self.total
        self.total = Taken(self.total.jobs_s + taken.jobs_s, self.total.machine_s + taken.machine_s)

    def at(self, moment_s: float) -> Taken:
        """As of a moment in the last step, or after it: who arrives meanwhile waits for the rest of
        the step.
        """
        started_s, ended_s, before = self._step
        if moment_s >= ended_s:
            return self.total
        if moment_s <= started_s:
            return before
        return self.total.since(
            self.total.since(before, (ended_s - moment_s) / (ended_s - started_s))
        )


def taken_of(plan: Plan, *, step_s: float, forward_s: float) -> Taken:
    """What was taken of a step that took this long, and its forward pass: jobs and batch work took
    all but the rows of requests that somebody waits for, in seconds of the whole device.
    """
    planned = plan.prediction
    if not planned.forward_s:
        return Taken(step_s - forward_s)
    own_s = (
        forward_s
        * planned.forward_speed
        * (1 - (planned.window_s + planned.batch_s) / planned.forward_s)
    )
    return Taken(step_s - own_s, own_s - profiled_s(planned))


def profiled_s(planned: Prediction) -> float:
    """What the requests' rows take by the profile."""
    return (planned.forward_s - planned.window_s - planned.batch_s) / planned.forward_correction
