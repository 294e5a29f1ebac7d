"""FineInfer's deferred continuous batching, as LLMStation describes it (sections 2.3 and 4.1).

Requests and jobs have the device in turns. While any request runs, jobs stand still, and others
join at every iteration. When none runs, arriving requests are deferred until the oldest has waited
for its share of the TTFT SLO, so that more of them run together; meanwhile, jobs have the device.
The context is switched between iterations: requests wait for the end of the current tuning
iteration.
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies._turns import alternate
from coserve.scheduling.policies.base import Policy, setting


@dataclass(frozen=True, kw_only=True)
class Fineinfer(Policy):
    """FineInfer's deferred continuous batching: jobs while requests are deferred, to run
    together.
    """

    summary: ClassVar[str] = "jobs while requests are deferred, to run together (FineInfer)"
    runs_whole_passes: ClassVar[bool] = True

    deferral: float = setting(0.5, "The deferral bound, as a share of the TTFT SLO.", most=1)

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        return alternate(view, latency, serves=bool(view.requests) or self.is_due(view))

    def is_due(self, view: View) -> bool:
        """Return whether a waiting request has been deferred for long enough."""
        return any(
            request.may_start
            and view.now_s >= request.info.arrival_s + self.deferral * request.info.ttft_s
            for request in view.waiting
        )
