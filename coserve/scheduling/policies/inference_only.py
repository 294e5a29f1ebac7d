"""Baseline: requests alone, as the default policy serves them; jobs stand still."""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies.slack import Slack


@dataclass(frozen=True, kw_only=True)
class InferenceOnly(Slack):
    """The baseline without jobs."""

    summary: ClassVar[str] = "requests alone; jobs stand still"

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        return self.plan_steps(view, latency, tunes=False)
