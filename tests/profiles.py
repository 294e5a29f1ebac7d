"""Profiles of devices that nobody has measured."""

from typing import Any

from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.profile import Curve, Profile


def flat(seconds: float) -> Curve:
    """The same, whatever the rows."""
    return Curve(rows=(1, 4096), seconds=(seconds, seconds))


def free_but_for(job: JobCounts, **costs: Any) -> Profile:
    """Of a device on which nothing takes time but these fields of the profile."""
    curves = dict.fromkeys(("forward", "head", "loss", "backward"), flat(0.0))
    numbers = (
        "s_per_pair",
        "backward_s_per_pair",
        "s_per_key",
        "s_per_span",
        "s_per_bypass",
        "s_per_window_row",
    )
    zeros = dict.fromkeys((*numbers, "s_per_parameter", "update_s"), 0.0)
    model = ModelCounts(
        flops_per_row=1.0, flops_per_pair=1.0, head_flops_per_row=1.0, kv_bytes_per_key=1
    )
    return Profile(**{"model": model, "job": job, **curves, **zeros, **costs})
