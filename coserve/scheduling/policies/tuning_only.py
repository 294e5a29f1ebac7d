"""Baseline: jobs alone, in the largest pieces; requests wait."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class TuningOnly(Policy):
    """The baseline without requests."""

    summary: ClassVar[str] = "jobs alone; requests wait"

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        memory = MemoryPlan(view)
        memory.begin_packs(requests_first=False)
        build = PlanBuilder(view, latency, memory)
        build.tune(memory.jobs, inf)
        return build.build()
