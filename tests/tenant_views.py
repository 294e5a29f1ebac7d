"""What tenants have on a made-up device, and the plans that the default policy makes of it."""

from typing import Any

from profiles import free_but_for
from progress import changed, make_job, make_request

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobProgress, Plan, RequestProgress, TenantView, View
from coserve.scheduling.policies import make_policy
from coserve.scheduling.profile import Curve

NOW_S, TTFT_S, TPOT_S = 100.0, 2.0, 0.4
COUNTS = JobCounts(
    flops_per_row=1.0,
    backward_flops_per_row=1.0,
    backward_flops_per_pair=1.0,
    num_parts=4,
    num_bypasses=1,
    num_parameters=1,
)
# A forward pass takes 50 ms, and 1 ms more for each row; a tasklet as much.
ROWS = Curve(rows=(1, 4096), seconds=(0.051, 4.146))


def latency(backward: Curve = ROWS) -> LatencyModel:
    return LatencyModel(free_but_for(COUNTS, forward=ROWS, backward=backward))


def decoding(id: str, tenant: str, **fields: Any) -> RequestProgress:
    """A request that has just got its first token."""
    view = make_request(
        id,
        num_rows=1,
        num_past=100,
        num_output=1,
        arrival_s=NOW_S - 1,
        first_token_s=NOW_S,
        last_token_s=NOW_S,
        ttft_s=TTFT_S,
        tpot_s=TPOT_S,
        tenant=tenant,
    )
    return changed(view, **fields)


def prompt(id: str, tenant: str, rows: int, **fields: Any) -> RequestProgress:
    """A request that has just come."""
    view = make_request(
        id,
        num_rows=rows,
        num_past=0,
        num_output=0,
        arrival_s=NOW_S,
        first_token_s=None,
        last_token_s=NOW_S,
        ttft_s=TTFT_S,
        tpot_s=TPOT_S,
        tenant=tenant,
        num_pages=-(-rows // 16),
    )
    return changed(view, **fields)


def line(id: str, tenant: str, **fields: Any) -> RequestProgress:
    """A line of a batch that waits."""
    return prompt(id, tenant, 32, batch_due_s=NOW_S + 1000, **fields)


def job(id: str, tenant: str, phase: str = "backward", num_pages: int = 0) -> JobProgress:
    return make_job(
        id,
        phase,
        num_rows=256,
        num_rows_left=256,
        num_parts_left=4,
        mean_context_len=128.0,
        counts=COUNTS,
        tenant=tenant,
        num_pages=num_pages,
    )


def plan(used_s: dict[str, float], backward: Curve = ROWS, **fields: Any) -> Plan:
    """Return the plan of the default policy; used_s: the counters of tenants that have work;
    backward: its costs."""
    tenants = tuple([TenantView(name=name, used_s=seconds) for name, seconds in used_s.items()])
    defaults = {"num_free_pages": 10_000, "num_pages": 10_000, "ttft_s": TTFT_S, "tpot_s": TPOT_S}
    view = View(now_s=NOW_S, tenants=tenants, **(defaults | fields))
    return make_policy("slack").plan(view, latency(backward))


def running_line(id: str, tenant: str, num_held: int = 2) -> RequestProgress:
    """A line of a batch that decodes."""
    return decoding(id, tenant, num_held=num_held, batch_due_s=NOW_S + 1000)
