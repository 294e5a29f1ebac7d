"""FlexLLM's fixed temporal sharing (section 8.2): one iteration of tuning after every n iterations
of inference.

Requests and jobs have the device in turns, and nothing runs side by side: a tuning iteration lasts
as long as its pack takes, and requests wait for its end. Without requests, iterations of tuning
follow one another.
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.history import History, StepView
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies._turns import alternate, has_requests
from coserve.scheduling.policies.base import Policy, setting


@dataclass
class _Iterations(History):
    """A count of iterations."""

    num_inference: int = 0
    """Iterations of inference since the last work of a job."""

    def add(self, step: StepView) -> None:
        if step.tunes:
            self.num_inference = 0
        elif step.serves:
            self.num_inference += 1


@dataclass(frozen=True, kw_only=True)
class TemporalSharing(Policy):
    """FlexLLM's temporal sharing: an iteration of tuning after every n of inference."""

    summary: ClassVar[str] = (
        "an iteration of tuning after every n of inference (FlexLLM section 8.2)"
    )
    runs_whole_passes: ClassVar[bool] = True

    n: int = setting(
        128,
        "Iterations of inference between two of tuning; the paper has 64, 128 and 512.",
        least=1,
    )

    def make_history(self) -> History:
        return _Iterations()

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        history: _Iterations = view.history or _Iterations()
        return alternate(
            view, latency, serves=has_requests(view) and history.num_inference < self.n
        )
