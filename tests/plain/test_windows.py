"""How many rows of a job a step takes forward: as many as cost least each, not as many as fit."""

from dataclasses import replace

import pytest
from profiles import free_but_for
from progress import make_job

from coserve.scheduling import LatencyModel, View, make_policy
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.profile import Curve

COUNTS = JobCounts(
    flops_per_row=1.0,
    backward_flops_per_row=1.0,
    backward_flops_per_pair=1.0,
    num_parts=4,
    num_bypasses=7,
    num_parameters=100,
)
CHEAP = Curve(rows=(1, 4096), seconds=(1e-4, 1e-3))
PROFILE = free_but_for(COUNTS, head=CHEAP, loss=CHEAP, backward=CHEAP, update_s=1e-4)


def window_rows(policy: str, *seconds: float) -> list[int]:
    """Of the first step of a job of 1,024 rows; seconds: of a forward pass of 1, 128, 256, 512 and
    1,024 rows."""
    forward = Curve(rows=(1, 128, 256, 512, 1024), seconds=seconds)
    job = make_job(
        "job",
        "forward",
        num_rows=1024,
        num_rows_left=1024,
        num_parts_left=4,
        mean_context_len=32.0,
        counts=COUNTS,
    )
    view = View(now_s=1.0, jobs=(job,), ttft_s=1e6, tpot_s=1e5)
    plan = make_policy(policy).plan(view, LatencyModel(replace(PROFILE, forward=forward)))
    return [rows.rows for rows in plan.rows if rows.kind == "window"]


@pytest.mark.parametrize("policy", ["slack", "tuning-only"])
def test_the_window_is_the_cheapest_per_row_not_the_largest(policy):
    assert window_rows(policy, 0.1, 0.1, 0.2, 0.4, 0.7) == [1024], "the largest is cheapest"
    assert window_rows(policy, 0.1, 0.1, 0.2, 0.3, 0.7) == [512], (
        "two of them take less than one of twice the rows"
    )
    assert window_rows(policy, 0.1, 0.1, 0.25, 0.6, 1.5) == [128]
