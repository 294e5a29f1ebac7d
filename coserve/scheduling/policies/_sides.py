"""Building blocks of policies that divide the device: requests on some of its units, jobs beside
them on the others.

A step of the engine is divided where it has both rows of requests and backward work (`Partition`).
A job's windows are rows of the requests' own pass, for there is one copy of the weights: they get
as much time in it as they would be worth on the job's part of the device. Where only one side has
something to run, it has the whole device, which is kinder to these policies than processes on fixed
parts would be.
"""

from math import inf

from msgspec import structs

from coserve.scheduling.building import MIN_WINDOW_ROWS, PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobProgress, Partition, Plan


def tune_beside(
    build: PlanBuilder,
    job: JobProgress,
    latency: LatencyModel,
    partition: Partition,
    *,
    unit_s: float = inf,
    until_s: float = inf,
) -> Plan:
    """Return the plan with a job's work beside the forward pass, for as long as that lasts on its
    part of the device.

    A job whose smallest piece is worth more gets it as soon as it has waited for as long as that
    takes there.

    Args:
        build: Plan with rows of requests.
        unit_s: Maximum time of a tasklet on its part of the device.
        until_s: Time by which a pass with a window in it, an optimizer step, or what runs beside
            the pass must have ended.
    """
    forward_speed, backward_speed = latency.sharing.speeds(
        partition, forward_rows=build.num_rows, tasklet_rows=max(1, job.num_rows_left)
    )
    worth_s = backward_speed * build.forward_s / forward_speed
    most_s = (
        until_s - build.seconds if job.phase in ("forward", "update") else backward_speed * until_s
    )
    add_units(build, job, latency, min(worth_s, most_s), unit_s=unit_s * backward_speed)
    if job.id not in build.served_jobs and build.piece_s(job, MIN_WINDOW_ROWS) <= min(
        backward_speed * job.waited_s, most_s
    ):
        build.take(job, 0)
    return divided(build.build(), partition, forward_speed, backward_speed)


def divided(plan: Plan, partition: Partition, forward_speed: float, backward_speed: float) -> Plan:
    """Return a plan on a partition, if it has work for both sides; tasklets that are left when the
    forward pass ends wait.
    """
    if not (plan.rows and (plan.losses or plan.tasklets)):
        return plan
    return structs.replace(
        plan,
        partition=partition._replace(stops=True),
        backward_limit_s=None,
        prediction=structs.replace(
            plan.prediction, forward_speed=forward_speed, backward_speed=backward_speed
        ),
    )


def add_units(
    build: PlanBuilder, job: JobProgress, latency: LatencyModel, seconds: float, *, unit_s: float
) -> None:
    """Add as much of a job as fits into seconds of the whole device, in tasklets of at most unit_s
    as far as rows can be few.
    """
    if job.phase != "backward" or unit_s == inf:
        build.tune([job], build.seconds + seconds)
        return
    rows = job.num_rows
    while rows > MIN_WINDOW_ROWS and latency.tasklet_s(job, rows) > unit_s:
        rows = max(MIN_WINDOW_ROWS, rows // 2)
    build.take(job, rows, int(seconds / latency.tasklet_s(job, rows)))
