"""What a plan must be like to be run, beyond pages: a policy is one file that anybody may write."""

from collections import Counter
from collections.abc import Mapping, Sequence

from coserve.engine.jobs.job import Job
from coserve.errors import PolicyError
from coserve.scheduling.plan import JobPhase, Partition, Plan


def check_plan(plan: Plan, jobs: Mapping[str, Job], policy: str, *, num_units: int) -> None:
    """PolicyError if an item has two pieces of one kind, an empty one, or one of a job that is at something else; or if
    the device has not as many units as the partition.

    plan: without what there is no memory for. policy: its name. num_units: of the device.
    """
    if max(len(plan.rows), len(plan.losses), len(plan.tasklets), len(plan.updates)) > 1:
        _check_once(policy, "rows of request", [rows.item for rows in plan.rows if rows.kind != "window"])
        _check_once(policy, "a window of job", [rows.item for rows in plan.rows if rows.kind == "window"])
        _check_once(policy, "a piece of the loss of job", [piece.job for piece in plan.losses])
        _check_once(policy, "tasklets of job", [part.job for part in plan.tasklets])
        _check_once(policy, "an optimizer step of job", plan.updates)
    for rows in plan.rows:
        if rows.rows < 1:
            _check_size(policy, rows.item, rows.rows)
        if rows.kind == "window":
            _check_phase(policy, "a window", jobs[rows.item], "forward")
    losses: dict[str, int] = {}
    for piece in plan.losses:
        losses[piece.job] = piece.rows
        _check_size(policy, piece.job, piece.rows)
        _check_phase(policy, "a piece of the loss", jobs[piece.job], "loss")
    for part in plan.tasklets:
        job = jobs[part.job]
        _check_size(policy, part.job, min(part.rows, part.num_tasklets))
        # Losses come first in a step: tasklets may follow the last piece of it.
        ends_loss = job.phase == "loss" and losses.get(part.job, 0) >= job.packs.num_loss_rows_left
        if not ends_loss:
            _check_phase(policy, "tasklets", job, "backward")
    if plan.partition is not None:
        _check_units(policy, plan.partition, num_units)


def _check_once(policy: str, what: str, items: Sequence[str]) -> None:
    if len(set(items)) == len(items):
        return
    for item, number in Counter(items).items():
        if number > 1:
            raise PolicyError(f"policy {policy} plans {what} {item!r} {number} times in one step; once is right")


def _check_size(policy: str, item: str, number: int) -> None:
    if number < 1:
        raise PolicyError(f"policy {policy} plans a piece of {item!r} without rows; leave it out, or plan one at least")


def _check_phase(policy: str, what: str, job: Job, right: JobPhase) -> None:
    if job.phase != right:
        raise PolicyError(f"policy {policy} plans {what} of job {job.id!r}, which is at {job.phase!r}, not {right!r}")


def _check_units(policy: str, partition: Partition, num_units: int) -> None:
    forward, backward = partition.forward_units, partition.backward_units
    if min(forward, backward) < 1 or forward + backward > num_units:
        right = f"at least one each and {num_units} together" if num_units > 1 else "no partition"
        raise PolicyError(
            f"policy {policy} plans {forward} units for the forward pass and {backward} for jobs beside it on a device "
            f"that has {num_units}; {right} would be right"
        )
