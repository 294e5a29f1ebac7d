"""Scheduling: what a policy sees (View), what it decides (Plan), what steps will cost (LatencyModel), and SLOs."""

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import (
    JobView,
    Partition,
    Plan,
    PlannedLoss,
    PlannedRows,
    PlannedTasklets,
    RequestView,
    View,
)
from coserve.scheduling.policies import Policy, make_policy, policy_names

__all__ = [
    "JobView",
    "LatencyModel",
    "Partition",
    "Plan",
    "PlannedLoss",
    "PlannedRows",
    "PlannedTasklets",
    "Policy",
    "RequestView",
    "View",
    "make_policy",
    "policy_names",
]
