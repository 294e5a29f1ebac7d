"""Scheduling: what a policy sees (View), what it decides (Plan), what steps will cost
(LatencyModel), and SLOs.
"""

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import (
    JobInfo,
    JobProgress,
    Partition,
    Plan,
    PlannedLoss,
    PlannedRows,
    PlannedTasklets,
    Prediction,
    RequestInfo,
    RequestProgress,
    View,
)
from coserve.scheduling.policies import Policy, make_policy, policy_names

__all__ = [
    "JobInfo",
    "JobProgress",
    "LatencyModel",
    "Partition",
    "Plan",
    "PlannedLoss",
    "PlannedRows",
    "PlannedTasklets",
    "Policy",
    "Prediction",
    "RequestInfo",
    "RequestProgress",
    "View",
    "make_policy",
    "policy_names",
]
