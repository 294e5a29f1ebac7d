"""A policy's record of earlier steps, kept by the engine, which reports every step to it.

A policy itself keeps nothing between calls. One whose decisions follow from earlier steps
(iterations that are counted, latencies that are recorded) makes a `History`, and finds it in every
view.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View


class StepView(NamedTuple):
    """A step that was run."""

    view: View
    """View that it was planned from."""
    latency: LatencyModel
    """Latency model that it was planned with."""
    plan: Plan
    """Plan that ran."""
    forward_s: float
    """Time of its forward pass."""
    loss_s: float
    """Time of its losses."""
    backward_s: float
    """Time of its tasklets."""
    update_s: float
    """Time of its optimizer steps."""
    beside_s: float
    """Time of tasklets beside the forward pass."""
    num_tasklets: Mapping[str, int]
    """Tasklets that ran, by job."""
    num_beside: Mapping[str, int]
    """Tasklets that ran beside the forward pass, by job."""
    num_running: int
    """Sequences of requests that run after the step."""
    num_waiting: int
    """Sequences of requests that wait after it."""
    num_arrived: int
    """Sequences that have ever arrived."""
    num_ended: int
    """Sequences that have ever ended."""

    @property
    def serves(self) -> bool:
        """Return whether rows of requests ran."""
        return any(rows.kind != "window" for rows in self.plan.rows)

    @property
    def tunes(self) -> bool:
        """Return whether any work of a job ran."""
        return bool(self.plan.moved_jobs or self.plan.updates)


class History(ABC):
    """A record that a policy makes and reads, and the engine keeps."""

    @abstractmethod
    def add(self, step: StepView) -> None:
        """Record a step that was run."""
