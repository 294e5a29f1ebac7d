"""What a policy needs to know of the steps so far: the engine keeps it, and tells it every step.

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
    """A step that was run.

    view, latency, plan: what it was planned from, and what ran. forward_s, loss_s, backward_s,
    update_s: what its sections took; beside_s: tasklets beside the forward pass. num_tasklets,
    num_beside: all that ran, and those, by job. num_running, num_waiting: sequences of requests
    after it. num_arrived, num_ended: sequences that ever came, and that ever ended.
    """

    view: View
    latency: LatencyModel
    plan: Plan
    forward_s: float
    loss_s: float
    backward_s: float
    update_s: float
    beside_s: float
    num_tasklets: Mapping[str, int]
    num_beside: Mapping[str, int]
    num_running: int
    num_waiting: int
    num_arrived: int
    num_ended: int

    @property
    def serves(self) -> bool:
        """Whether rows of requests ran."""
        return any(rows.kind != "window" for rows in self.plan.rows)

    @property
    def tunes(self) -> bool:
        """Whether any work of a job ran."""
        return bool(self.plan.moved_jobs or self.plan.updates)


class History(ABC):
    """Made by a policy, kept by the engine, read by the policy alone."""

    @abstractmethod
    def add(self, step: StepView) -> None:
        """A step was run."""
