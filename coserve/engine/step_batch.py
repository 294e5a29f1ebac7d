"""Execution of a plan: pages are reassigned, the plan is checked, the device's batch is built, and
the latency model is updated.

A policy is one file that anybody may write, so its plans are checked as a user's input is.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from msgspec import structs

from coserve.devices.messages.commands import Command
from coserve.devices.messages.steps import (
    LossRows,
    RequestRows,
    StepBatch,
    StepResult,
    Tasklets,
    Update,
    WindowRows,
)
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.job_set import JobSet
from coserve.engine.request_queue import RequestQueue
from coserve.errors import PolicyError
from coserve.scheduling.aged_factors import size_class
from coserve.scheduling.corrections import Corrections
from coserve.scheduling.latency import LatencyModel, tasklet_section
from coserve.scheduling.plan import (
    JobPhase,
    Partition,
    Plan,
    PlannedLoss,
    PlannedRows,
    PlannedTasklets,
)

Piece = TypeVar("Piece", PlannedRows, PlannedLoss, PlannedTasklets)


def prepare_plan(
    plan: Plan,
    requests: RequestQueue,
    jobs: JobSet,
    *,
    policy: str,
    send: Callable[[Command], None],
    max_requests: int,
    num_units: int,
) -> Plan:
    """Reassign pages as a plan says, as far as possible, and return the part of the plan that can
    run.

    Args:
        policy: Name of the policy.
        send: Has the device do a command with the step.
        num_units: Units of the device.

    Raises:
        PolicyError: the plan can never run.
    """
    # Pages are given back (preemptions, drops) before any are taken (admissions, rows, packs).
    for id in plan.preempt:
        if (request := requests.running.get(id)) is not None:
            send(requests.preempt(request))
    for job_id in plan.drop:
        if job_id in jobs and jobs[job_id].has_pack:
            jobs.drop(jobs[job_id])
    for id in plan.admit:
        request = requests.waiting.get(id)
        # Not an error: plans are made from a view, in which a request may still seem free to start.
        if (
            request is None
            or not requests.may_start(request)
            or len(requests.running) >= max_requests
        ):
            continue
        if (opened := requests.admit(request)) is not None:
            send(opened)
    # After the admissions, whose rows are among these.
    reserved = {rows.item: requests.reserve(rows) for rows in plan.rows if rows.kind != "window"}
    # Packs come last: they get the pages that requests leave.
    for job_id in plan.begin:
        if job_id in jobs:
            jobs.begin(job_id)
    plan = _runnable(plan, reserved, jobs)
    check_plan(plan, jobs, policy, num_units=num_units)
    return plan


def _runnable(
    plan: Plan, reserved: Mapping[str, PlannedRows | None], jobs: Mapping[str, Job]
) -> Plan:
    """Return the plan without what has no pages, and with rows as they are now. reserved: rows of
    requests.

    Where something is left out, the sections' predictions are of another step: they become 0, and
    are not used for corrections.
    """
    if _runs_whole(plan, reserved, jobs):
        return plan
    kept = [
        reserved[each.item] if each.kind != "window" else _window(each, jobs) for each in plan.rows
    ]
    rows = tuple([each for each in kept if each is not None])
    losses = tuple(
        [_limited(jobs[piece.job], piece) for piece in plan.losses if _has_pack(jobs, piece.job)]
    )
    # Tasklets may follow the last rows of the loss; not if these turned out not to be the last.
    cut = {piece.job for piece in losses if piece not in plan.losses}
    tasklets = tuple(
        [
            _limited(jobs[part.job], part)
            for part in plan.tasklets
            if _has_pack(jobs, part.job) and part.job not in cut
        ]
    )
    updates = tuple([job for job in plan.updates if job in jobs and jobs[job].update_due])
    # A partition is pointless if either side has lost all of its work.
    has_sides = plan.partition is None or (rows and (losses or tasklets))
    is_same = (
        rows == plan.rows
        and losses == plan.losses
        and tasklets == plan.tasklets
        and updates == plan.updates
    )
    if is_same and has_sides:
        return plan
    planned = plan.prediction
    prediction = structs.replace(
        planned,
        forward_s=planned.forward_s if rows == plan.rows else 0.0,
        loss_s=planned.loss_s if losses == plan.losses else 0.0,
        backward_s=planned.backward_s if tasklets == plan.tasklets else 0.0,
        update_s=planned.update_s if updates == plan.updates else 0.0,
        forward_speed=planned.forward_speed if has_sides else 1.0,
        backward_speed=planned.backward_speed if has_sides else 0.0,
    )
    return structs.replace(
        plan,
        rows=rows,
        losses=losses,
        tasklets=tasklets,
        updates=updates,
        partition=plan.partition if has_sides else None,
        prediction=prediction,
    )


def _runs_whole(
    plan: Plan, reserved: Mapping[str, PlannedRows | None], jobs: Mapping[str, Job]
) -> bool:
    """Return whether nothing of the plan is left out or made smaller, as is so for nearly all
    plans.
    """
    if plan.partition is not None and not (plan.rows and (plan.losses or plan.tasklets)):
        return False
    for rows in plan.rows:
        if rows.kind != "window":
            # `reserve` returns the very same object where rows are as planned.
            if reserved[rows.item] is not rows:
                return False
        elif not _may_run(jobs, rows.item, rows.rows):
            return False
    pieces: tuple[PlannedLoss | PlannedTasklets, ...] = (*plan.losses, *plan.tasklets)
    for piece in pieces:
        if not _may_run(jobs, piece.job, piece.rows):
            return False
    return not plan.updates or all(job in jobs and jobs[job].update_due for job in plan.updates)


def _may_run(jobs: Mapping[str, Job], job_id: str, num_rows: int) -> bool:
    """Return whether this many rows of a job's pack can run at once."""
    if job_id not in jobs:
        return False
    job = jobs[job_id]
    return job.has_pack and job.progress.memory_failures.limit(num_rows) == num_rows


def _window(planned: PlannedRows, jobs: Mapping[str, Job]) -> PlannedRows | None:
    return _limited(jobs[planned.item], planned) if _has_pack(jobs, planned.item) else None


def _limited(job: Job, piece: Piece) -> Piece:
    """Return a piece of a job with no more rows than its memory failures allow."""
    num_rows = job.progress.memory_failures.limit(piece.rows)
    return piece if num_rows == piece.rows else structs.replace(piece, rows=num_rows)


def _has_pack(jobs: Mapping[str, Job], job: str) -> bool:
    return job in jobs and jobs[job].has_pack


def build_batch(
    step: int,
    plan: Plan,
    requests: RequestQueue,
    jobs: Mapping[str, Job],
    commands: tuple[Command, ...],
) -> StepBatch:
    """Return the device's batch for a plan that can run."""
    # Rows of one adapter side by side, so that its bypasses run once for all of them.
    by_version: dict[str, list[RequestRows]] = {}
    windows: list[WindowRows] = []
    for rows in plan.rows:
        if rows.kind == "window":
            windows.append(WindowRows(rows.item, rows.rows))
        else:
            request = requests.running[rows.item]
            by_version.setdefault(request.info.version, []).append(request.next_rows(rows.rows))
    return StepBatch(
        step=step,
        commands=commands,
        losses=tuple([LossRows(piece.job, piece.rows) for piece in plan.losses])
        if plan.losses
        else (),
        tasklets=tuple(
            [Tasklets(part.job, part.rows, part.num_tasklets, part.group) for part in plan.tasklets]
        ),
        updates=tuple(
            [
                Update(job, jobs[job].progress.num_trained, jobs[job].order.num_steps)
                for job in plan.updates
            ]
        ),
        requests=tuple([rows for _, group in sorted(by_version.items()) for rows in group])
        if by_version
        else (),
        windows=tuple(windows),
        backward_limit_s=plan.backward_limit_s,
        partition=plan.partition,
    )


def update_latency_model(
    latency: LatencyModel,
    plan: Plan,
    result: StepResult,
    parameters: Sequence[int],
    models: Mapping[str, str] = MappingProxyType({}),
    *,
    step_s: float,
) -> None:
    """Correct the latency model by a step's measured times.

    A section's time counts once for each size in it, however many pieces of that size it has.

    Args:
        parameters: Number of parameters of each optimizer step.
        models: Models of the jobs that have tasklets, as `JobCounts` names them.
        step_s: Duration of the step.
    """
    joined: dict[tuple[str, int], int] = {}
    run = beside = 1.0
    planned, corrections = plan.prediction, latency.corrections
    if plan.tasklets:
        joined = {
            (section, size_class(num_rows)): num_rows
            for section, num_rows in _joined_rows(plan, models)
        }
        run, beside = _share_run(plan, result.num_tasklets), _share_run(plan, result.num_beside)
    if plan.partition is not None:
        worth_s = planned.loss_s + planned.backward_s * beside
        _observe_sides(latency, plan.partition, plan, result, worth_s, joined.values())
    else:
        _observe_forward_and_loss(corrections, plan, result)
    # What ran beside the forward pass was compared in `_observe_sides`; this is the rest.
    after_s = planned.backward_s * (run - beside)
    for (section, _), num_rows in joined.items():
        # Time spent waiting for weights is not work.
        seconds = result.backward_s - result.weights_wait_s
        corrections.observe(section, num_rows, False, predicted_s=after_s, measured_s=seconds)
    for number in (
        {size_class(number): number for number in parameters}.values() if parameters else ()
    ):
        corrections.observe(
            "update", number, False, predicted_s=planned.update_s, measured_s=result.update_s
        )
    # The time of a step outside the device's sections: planning, messages, results.
    latency.overhead.observe(step_s - result.seconds, begins=bool(plan.begin))
    # Plans predict neither copies nor waits for weights, so both are left out of the comparison.
    waited_s = result.copy_s + result.weights_wait_s
    latency.observe_step(
        predicted_s=planned.seconds_with(planned.backward_s * run), measured_s=step_s - waited_s
    )


def _observe_forward_and_loss(corrections: Corrections, plan: Plan, result: StepResult) -> None:
    if plan.rows:
        num_rows = sum([rows.rows for rows in plan.rows])
        windows = "window" in [rows.kind for rows in plan.rows]
        corrections.observe(
            "forward",
            num_rows,
            windows,
            predicted_s=plan.prediction.forward_s,
            measured_s=result.forward_s,
        )
    if plan.losses:
        num_rows = sum([piece.rows for piece in plan.losses])
        corrections.observe(
            "loss", num_rows, False, predicted_s=plan.prediction.loss_s, measured_s=result.loss_s
        )


def _observe_sides(
    latency: LatencyModel,
    partition: Partition,
    plan: Plan,
    result: StepResult,
    beside_s: float,
    joined: Iterable[int],
) -> None:
    """Correct the speeds of a divided step's sides.

    Args:
        beside_s: Seconds of the whole device that the work of jobs beside the forward pass was
            predicted to be worth.
        joined: Rows of its tasklets.
    """
    num_rows = sum([rows.rows for rows in plan.rows])
    if result.forward_s > 0:
        reached = plan.prediction.forward_s / result.forward_s
        latency.sharing.observe(partition, "forward", num_rows, measured=reached)
    # A tasklet that is under way when the forward pass ends ends on the whole device.
    whole_s = max(0.0, result.beside_s - result.forward_s) if result.num_beside else 0.0
    if result.beside_s > whole_s:
        # What the divided device did, over the time for which it was divided.
        reached = (beside_s - whole_s) / (result.beside_s - whole_s)
        for rows in joined:
            latency.sharing.observe(partition, "backward", rows, measured=reached)


def _joined_rows(plan: Plan, models: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the section of corrections and the rows of the tasklets that run at once, by group."""
    num_rows_of: dict[int | str, int] = {}
    sections: dict[int | str, str] = {}
    for part in plan.tasklets:
        # Tasklets without a group run by themselves, under their job's id.
        group = part.job if part.group is None else part.group
        num_rows_of[group] = num_rows_of.get(group, 0) + part.rows
        sections[group] = tasklet_section(models.get(part.job, ""))
    return [(sections[group], num_rows) for group, num_rows in num_rows_of.items()]


def _share_run(plan: Plan, num_tasklets: Mapping[str, int]) -> float:
    """Return the share of the planned backward work that these tasklets are: those before the time
    limit.
    """
    if not num_tasklets:
        return 0.0
    planned = sum([part.rows * part.num_tasklets for part in plan.tasklets])
    if not planned:
        return 1.0
    return sum([part.rows * num_tasklets.get(part.job, 0) for part in plan.tasklets]) / planned


def check_plan(plan: Plan, jobs: Mapping[str, Job], policy: str, *, num_units: int) -> None:
    """Check that a plan can be run, apart from pages.

    Args:
        plan: The plan without the pieces for which there is no memory.
        policy: Name of the policy.
        num_units: Units of the device.

    Raises:
        PolicyError: an item has two pieces of one kind, an empty one, or one for a phase that its
            job is not in; or the device does not have as many units as the partition.
    """
    # With at most one piece of each kind, nothing can be planned twice.
    if max(len(plan.rows), len(plan.losses), len(plan.tasklets), len(plan.updates)) > 1:
        _check_once(
            policy, "rows of request", [rows.item for rows in plan.rows if rows.kind != "window"]
        )
        _check_once(
            policy, "a window of job", [rows.item for rows in plan.rows if rows.kind == "window"]
        )
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
        begun = job.progress.begun
        ends_loss = (
            begun is not None
            and losses.get(part.job, 0) >= begun.num_loss_rows_left
            and job.phase == "loss"
        )
        if not ends_loss:
            _check_phase(policy, "tasklets", job, "backward")
    if plan.partition is not None:
        _check_units(policy, plan.partition, num_units)


def _check_once(policy: str, what: str, items: Sequence[str]) -> None:
    if len(set(items)) == len(items):
        return
    for item, number in Counter(items).items():
        if number > 1:
            raise PolicyError(
                f"policy {policy} plans {what} {item!r} {number} times in one step; once is right"
            )


def _check_size(policy: str, item: str, number: int) -> None:
    if number < 1:
        raise PolicyError(
            f"policy {policy} plans a piece of {item!r} without rows; leave it out, or plan one at "
            f"least"
        )


def _check_phase(policy: str, what: str, job: Job, right: JobPhase) -> None:
    if job.phase != right:
        raise PolicyError(
            f"policy {policy} plans {what} of job {job.id!r}, which is at {job.phase!r}, not "
            f"{right!r}"
        )


def _check_units(policy: str, partition: Partition, num_units: int) -> None:
    forward, backward = partition.forward_units, partition.backward_units
    if min(forward, backward) < 1 or forward + backward > num_units:
        right = f"at least one each and {num_units} together" if num_units > 1 else "no partition"
        raise PolicyError(
            f"policy {policy} plans {forward} units for the forward pass and {backward} for jobs "
            f"beside it on a device "
            f"that has {num_units}; {right} would be right"
        )
