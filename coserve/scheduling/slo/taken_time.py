"""Time of requests that something else took: work of jobs, or a device that is slower than its
profile.
"""

from typing import NamedTuple

from coserve.scheduling.plan import Plan, Prediction


class Taken(NamedTuple):
    """Seconds that requests did not need themselves."""

    jobs_s: float = 0.0
    """Seconds that work of jobs took."""
    machine_s: float = 0.0
    """Seconds that rows of requests took beyond the profile; below 0 if they took less."""

    def since(self, earlier: "Taken", share: float = 1.0) -> "Taken":
        """Return a share of the time taken since an earlier moment; by default all of it."""
        jobs_s, machine_s = self.jobs_s - earlier.jobs_s, self.machine_s - earlier.machine_s
        return Taken(share * jobs_s, share * machine_s)


class TakenTime:
    """The total of time taken from an engine's requests."""

    def __init__(self) -> None:
        self.total = Taken()
        self._step = (0.0, 0.0, Taken())  # the last: its start, its end, the total before it

    def add(self, taken: Taken, *, started_s: float, ended_s: float) -> None:
        """Add a step and the time taken in it."""
        self._step = started_s, ended_s, self.total
        self.total = Taken(self.total.jobs_s + taken.jobs_s, self.total.machine_s + taken.machine_s)

    def at(self, moment_s: float) -> Taken:
        """Return the total at a moment in the last step, or after it: a request that arrives
        meanwhile waits for the rest of the step.
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
    """Return the time taken of a step: jobs and batch work took all but the rows of requests that a
    client waits for, in seconds of the whole device.

    Args:
        step_s: Measured time of the step.
        forward_s: Measured time of its forward pass.
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
    """Return the time of the requests' rows by the profile."""
    return (planned.forward_s - planned.window_s - planned.batch_s) / planned.forward_correction
