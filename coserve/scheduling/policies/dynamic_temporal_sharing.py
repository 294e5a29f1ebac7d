"""FlexLLM's dynamic temporal sharing (appendix A, algorithm 3): an interval that follows queues,
arrivals and completions.

As `temporal_sharing`, but after each tuning iteration a number of inference iterations is chosen
for the next, from 64 to 512. Every third time it is worked out anew from what was seen since the
last one: the mean and the longest queue, and by how much more requests arrived than were completed
per iteration. In between, the last one is stretched by a tenth.

Where the listing leaves room: the adjustment of line 38 applies to whatever the branches before it
chose, as the text has it ("to computed frequencies"), and the first interval is the shortest. The
means are over the iterations since the last choice; mean batch sizes are collected there, and used
for nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.history import History, StepView
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies._turns import alternate, has_requests
from coserve.scheduling.policies.base import Policy

MIN_INTERVAL, MAX_INTERVAL = 64, 512
# Mean queue, longest queue, and arrivals beyond completions per iteration, at which each kind of
# pressure is 1.
QUEUE, SPIKE, BACKLOG = 20.0, 25.0, 8.0
# The most that queue and spike may count; pressures with the shortest and with the longest
# interval.
MAX_QUEUE, MAX_SPIKE = 1.0, 0.5
CALM, PRESSED = 0.8, 2.0
SCALE, STABILIZATION, FLOOR = 0.6, 1.35, MIN_INTERVAL + 16
# Intervals are worked out at every third switch, and are stretched by this factor at the others.
SWITCHES_PER_CHOICE, STRETCH = 3, 1.1


@dataclass
class Switching(History):
    """The variables of algorithm 3."""

    left: float = MIN_INTERVAL
    """Inference iterations until the next switch (s)."""
    smoothed: float = MIN_INTERVAL
    """Smoothed interval (f_p)."""
    num_switches: int = 0
    """Switches since the interval was last worked out (d)."""
    due: bool = False
    """Whether it is time for an iteration of tuning."""
    num_steps: int = 0
    """Inference iterations since the last switch; with the next two, Q."""
    sum_queue: int = 0
    """Sum of the queue's lengths after each of them."""
    max_queue: int = 0
    """Longest queue among them."""
    arrived: int = 0
    """Requests that had arrived at the last switch; r_a is the difference to it."""
    ended: int = 0
    """Requests that had ended at the last switch; r_c is the difference to it."""

    def add(self, step: StepView) -> None:
        if step.tunes:
            self.due = False
        elif step.serves:
            self._count(step)

    def _count(self, step: StepView) -> None:
        """Run SCHEDULER_STEP."""
        self.num_steps += 1
        self.sum_queue += step.num_waiting
        self.max_queue = max(self.max_queue, step.num_waiting)
        self.left -= 1
        if self.left > 0:
            return
        self.due = True
        self.num_switches += 1
        if self.num_switches >= SWITCHES_PER_CHOICE:
            self.left, self.num_switches = self._next_interval(step), 0
        else:
            self.left = min(MAX_INTERVAL, STRETCH * self.smoothed)
        self.num_steps = self.sum_queue = self.max_queue = 0
        self.arrived, self.ended = step.num_arrived, step.num_ended

    def _next_interval(self, step: StepView) -> float:
        """Run COMPUTE_NEXT_INTERVAL."""
        arrivals = (step.num_arrived - self.arrived) / self.num_steps
        completions = (step.num_ended - self.ended) / self.num_steps
        pressure = (
            min(MAX_QUEUE, self.sum_queue / self.num_steps / QUEUE)
            + min(MAX_SPIKE, self.max_queue / SPIKE)
            + max(0.0, (arrivals - completions) / BACKLOG)
        )
        interval = STABILIZATION * interval_at(pressure)
        self.smoothed = (interval + 2 * self.smoothed) / 3
        return min(MAX_INTERVAL, max(FLOOR, self.smoothed))


def interval_at(pressure: float) -> float:
    """Return the iterations of inference between two of tuning, by the pressure of requests (lines
    31 to 37).
    """
    if pressure <= CALM:
        return MIN_INTERVAL
    if pressure >= PRESSED:
        return MAX_INTERVAL
    return MIN_INTERVAL + (pressure - CALM) / (PRESSED - CALM) * SCALE * (
        MAX_INTERVAL - MIN_INTERVAL
    )


@dataclass(frozen=True, kw_only=True)
class DynamicTemporalSharing(Policy):
    """Temporal sharing at an interval that follows the load."""

    summary: ClassVar[str] = (
        "temporal sharing at an interval that follows the load (FlexLLM appendix A)"
    )
    runs_whole_passes: ClassVar[bool] = True

    def make_history(self) -> History:
        return Switching()

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        history: Switching = view.history or Switching()
        return alternate(view, latency, serves=has_requests(view) and not history.due)
