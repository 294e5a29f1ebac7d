"""What tenants have on a made-up device, and the plans that the default policy makes of it."""

from typing import Any

from msgspec import structs
from profiles import free_but_for

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobView, Plan, RequestView, TenantView, View
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


def decoding(id: str, tenant: str, **fields: Any) -> RequestView:
    """A request that has just got its first token."""
    view = RequestView(id, 1, 100, 1, NOW_S - 1, NOW_S, NOW_S, TTFT_S, TPOT_S, tenant=tenant)
    return structs.replace(view, **fields)


def prompt(id: str, tenant: str, rows: int, **fields: Any) -> RequestView:
    """A request that has just come."""
    view = RequestView(id, rows, 0, 0, NOW_S, None, NOW_S, TTFT_S, TPOT_S, tenant=tenant, num_pages=-(-rows // 16))
    return structs.replace(view, **fields)


def line(id: str, tenant: str, **fields: Any) -> RequestView:
    """A line of a batch that waits."""
    return prompt(id, tenant, 32, batch_due_s=NOW_S + 1000, **fields)


def job(id: str, tenant: str, phase: str = "backward", num_pages: int = 0) -> JobView:
    return JobView(id, phase, 256, 256, 4, 128.0, COUNTS, tenant=tenant, num_pages=num_pages)  # type: ignore[arg-type]


def plan(used_s: dict[str, float], backward: Curve = ROWS, **fields: Any) -> Plan:
    """Return the plan of the default policy; used_s: the counters of tenants that have work; backward: its costs."""
    tenants = tuple([TenantView(name, used_s=seconds) for name, seconds in used_s.items()])
    defaults = {"num_free_pages": 10_000, "num_pages": 10_000, "ttft_s": TTFT_S, "tpot_s": TPOT_S}
    view = View(now_s=NOW_S, tenants=tenants, **(defaults | fields))
    return make_policy("slack").plan(view, latency(backward))


def running_line(id: str, tenant: str, num_held: int = 2) -> RequestView:
    """A line of a batch that decodes."""
    return decoding(id, tenant, num_held=num_held, batch_due_s=NOW_S + 1000)
