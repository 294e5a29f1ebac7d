"""Baseline: jobs alone, in the largest pieces; requests wait."""

from math import inf

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View


def plan(view: View, latency: LatencyModel) -> Plan:
    """See the module."""
    build = PlanBuilder(view, latency)
    build.tune(view.jobs, inf)
    return build.build()
