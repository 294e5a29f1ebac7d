"""What policies share that divide the device: requests on some of its units, jobs beside them on the others.

A step of the engine is divided where it has both rows of requests and backward work (`Partition`). A job's windows are
rows of the requests' own pass, for there is one copy of the weights: they get as much time in it as they would be worth
on the job's part of the device. Where only one side has something to do, it has the whole device, which is kinder to
these policies than processes on fixed parts would be.
"""

from math import inf

from msgspec import structs

from coserve.scheduling.building import LEAST_WINDOW_ROWS, PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import JobView, Partition, Plan


def tune_beside(
    build: PlanBuilder,
    memory: MemoryPlan,
    job: JobView,
    latency: LatencyModel,
    partition: Partition,
    *,
    unit_s: float = inf,
    until_s: float = inf,
    least_share: float = 0.0,
) -> Plan:
    """The plan with a job's work beside the forward pass, for as long as that lasts on its part of the device.

    Args:
        build: with the rows of requests, of which there are some.
        unit_s: what a tasklet may take on its part of the device.
        until_s: when a pass with a window in it, or an optimizer step, must have ended.
        least_share: of the time, what the job gets in any case (`PlanBuilder.tune`).
    """
    forward_speed, backward_speed = latency.sharing.speeds(
        partition, forward_rows=build.num_rows, tasklet_rows=max(1, job.num_rows_left)
    )
    whole_s = build.seconds
    lasts_s = whole_s / forward_speed
    worth_s = backward_speed * lasts_s
    if job.phase in ("forward", "update"):
        worth_s = min(worth_s, until_s - whole_s)
    add_units(build, job, latency, worth_s, unit_s=unit_s * backward_speed, least_share=least_share)
    return divided(build.build(memory), partition, forward_speed, backward_speed)


def divided(plan: Plan, partition: Partition, forward_speed: float, backward_speed: float) -> Plan:
    """A plan on a partition, if it has work for both sides; tasklets that are left when the forward pass ends wait."""
    if not (plan.rows and (plan.losses or plan.tasklets)):
        return plan
    return structs.replace(
        plan,
        partition=partition._replace(stops=True),
        backward_limit_s=None,
        forward_speed=forward_speed,
        backward_speed=backward_speed,
    )


def add_units(
    build: PlanBuilder, job: JobView, latency: LatencyModel, seconds: float, *, unit_s: float, least_share: float = 0.0
) -> None:
    """As much of a job as fits into seconds of the whole device, in tasklets of at most unit_s if rows can be few."""
    if job.phase != "backward" or unit_s == inf:
        build.tune([job], build.seconds + seconds, least_share=least_share)
        return
    rows = job.num_rows
    while rows > LEAST_WINDOW_ROWS and latency.tasklet_s(job, rows) > unit_s:
        rows = max(LEAST_WINDOW_ROWS, rows // 2)
    build.take(job, rows, int(seconds / latency.tasklet_s(job, rows)))
