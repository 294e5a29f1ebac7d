"""Nodes and tasks for tests of placements."""

from typing import Any

from coserve.cluster.view import ClusterTask, Latency, NodeProfile, NodeView, TaskKind

PROFILE = NodeProfile(
    forward=Latency(fixed_s=0.01, s_per_token=1e-4),
    backward=Latency(fixed_s=0.02, s_per_token=2e-4),
    pages_per_trained_token=0.5,
)


def make_node(name: str, **fields: Any) -> NodeView:
    return NodeView(**{"id": name, "hardware": "gpu", "profile": PROFILE, **fields})


def make_task(name: str, kind: TaskKind = "request", **fields: Any) -> ClusterTask:
    return ClusterTask(**{"id": name, "kind": kind, "arrival_s": 0.0, "num_tokens": 100, **fields})
