"""Baseline: requests alone, as the default policy serves them; jobs stand still."""

from dataclasses import replace

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies import slack


def plan(view: View, latency: LatencyModel) -> Plan:
    """See the module."""
    return slack.plan(replace(view, jobs=()), latency)
