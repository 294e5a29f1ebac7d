"""A partition of jobs into those that run backward as one batch of rows and those that take turns:
MuxTune's task fusion (section 3.3) by measured curves.

Packs in memory are partitioned into hybrid tasks. Jobs of one hybrid task are multiplexed in space:
the next tasklets of all that are at the same part of the model are one batch. Hybrid tasks are
multiplexed in time: one after the other. A hybrid task costs what a tasklet of all its rows is
measured to take, times what joining packs is measured to add (`Profile.joining`: rows that are
copied side by side, adapters' own products, and a launch for each kernel where single packs have
captured calls). That is measured of jobs of one structure; others' adapters are taken to cost as
much. It needs room for copies of these rows, which stands for the memory of section 3.3 (equation
5): packs that are in memory have theirs. The partition that takes the least time is found by
dynamic programming over jobs sorted by their rows. Sequences are joined as they are, so nothing is
padded (section 3.5 aligns what is laid end to end here).

Pure arithmetic, run by every plan: jobs join and leave between any two steps. While packs have the
same rows, the latency model caches the partition.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobProgress, PlannedTasklets

# The smallest backward window of a job, unless it is all that is left.
MIN_ROWS = 16


def hybrid_tasks(
    jobs: Sequence[JobProgress], latency: LatencyModel, *, max_rows: int
) -> dict[str, int]:
    """Return the number of the hybrid task of each job that has a pack in memory; a job on another
    model has its own.

    Args:
        max_rows: Maximum number of rows of a batch, unless one pack has more: what is copied side
            by side has room.
    """
    packs = [job for job in jobs if job.phase in ("forward", "loss", "backward")]
    if len(packs) < 2:
        return {job.id: 0 for job in packs}
    # Negative numbers, so that no hybrid task of several packs has the same.
    alone = {job.id: -1 - number for number, job in enumerate(packs) if job.info.counts.model}
    packs = sorted([job for job in packs if job.id not in alone], key=_num_rows)
    if len(packs) < 2:
        return {**alone, **{job.id: 0 for job in packs}}
    tasks: dict[str, int] = alone
    shapes = tuple([(job.num_rows, latency.backward_weight(job)) for job in packs])
    for first, last in pairwise(
        latency.remember((max_rows, shapes), lambda: _cuts(shapes, latency, max_rows))
    ):
        # The end index names the hybrid task: no other has the same.
        for job in packs[first:last]:
            tasks[job.id] = last
    return tasks


def _cuts(
    shapes: Sequence[tuple[int, float]], latency: LatencyModel, max_rows: int
) -> tuple[int, ...]:
    """Return the indices at which hybrid tasks begin among packs, and the number of packs; it
    follows from the profile alone.

    Args:
        shapes: Rows of each pack with the weight of a row, sorted by rows.
    """
    # Running sums, so that those of any range of packs are differences.
    rows = [0, *accumulate([num_rows for num_rows, _ in shapes])]
    weighed = [0.0, *accumulate([num_rows * weight for num_rows, weight in shapes])]
    # best[m]: the least time of the first m jobs, and where their last hybrid task begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for last in range(1, len(shapes) + 1):
        cheapest = (inf, last - 1)
        for first in range(last - 1, -1, -1):
            num_rows = rows[last] - rows[first]
            is_one = last - first == 1
            # Even wider ranges have more rows still.
            if num_rows > max_rows and not is_one:
                break
            seconds = latency.batch_s(num_rows, weighed[last] - weighed[first])
            total_s = best[first][0] + (seconds if is_one else latency.profile.joining * seconds)
            # `<=`, since `first` falls: among equals the task with more packs wins.
            if total_s <= cheapest[0]:
                cheapest = (total_s, first)
        best.append(cheapest)
    # Followed from the end: each entry has the index at which its last hybrid task begins.
    cuts = [len(shapes)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return tuple(reversed(cuts))


class JoinedTasklets(NamedTuple):
    """Tasklets of jobs that run together."""

    tasklets: tuple[PlannedTasklets, ...]
    """Tasklets, one entry per job."""
    seconds: float
    """Time of all of them."""
    longest_s: float
    """Time of the longest that runs at once."""


def joined_tasklets(
    jobs: Sequence[JobProgress], left_s: float, latency: LatencyModel, *, group: int
) -> JoinedTasklets | None:
    """Return tasklets of jobs that go backward, with as many rows as possible: first what is left
    of the least advanced part, then whole parts. None if not even the smallest of all of them fits.
    """
    if len(jobs) == 1:
        return _tasklets_alone(jobs[0], left_s, latency)
    fewest = min([_parts_done(job) for job in jobs])
    now = [job for job in jobs if _parts_done(job) == fewest]
    rows = [job.num_rows_left for job in now]
    seconds = latency.tasklets_s(list(zip(now, rows, strict=True)))
    # Halve all windows until one batch of them fits.
    while seconds > left_s and max(rows) > MIN_ROWS:
        rows = [min(each, max(MIN_ROWS, each // 2)) for each in rows]
        seconds = latency.tasklets_s(list(zip(now, rows, strict=True)))
    if seconds > left_s:
        return None
    # Less than the rest of the part fits at once: as many equal batches as there is time for.
    if any(each < job.num_rows_left for job, each in zip(now, rows, strict=True)):
        most = min([job.num_rows_left // each for job, each in zip(now, rows, strict=True)])
        number = times(seconds, left_s, most)
        pieces = [
            PlannedTasklets(job.id, each, number, group)
            for job, each in zip(now, rows, strict=True)
        ]
        return JoinedTasklets(tuple(pieces), number * seconds, seconds)
    return _whole_parts(jobs, fewest, left_s, latency, group)


def _tasklets_alone(
    job: JobProgress, left_s: float, latency: LatencyModel
) -> JoinedTasklets | None:
    """Return tasklets of one job, as `joined_tasklets` does of several; most plans have one."""
    rows = job.num_rows_left
    first_s = latency.tasklet_s(job, rows)
    while first_s > left_s and rows > MIN_ROWS:
        rows = max(MIN_ROWS, rows // 2)
        first_s = latency.tasklet_s(job, rows)
    if first_s > left_s:
        return None
    if rows < job.num_rows_left:
        number = times(first_s, left_s, job.num_rows_left // rows)
        return JoinedTasklets((PlannedTasklets(job.id, rows, number),), number * first_s, first_s)
    number, seconds, longest_s = 1, first_s, first_s
    # The rest of the current part fits; whole parts follow.
    if job.num_parts_left > 1:
        part_s = latency.tasklet_s(job, job.num_rows)
        if num_more := times(part_s, left_s - first_s, job.num_parts_left - 1):
            number, seconds, longest_s = (
                1 + num_more,
                first_s + num_more * part_s,
                max(first_s, part_s),
            )
    return JoinedTasklets((PlannedTasklets(job.id, job.num_rows, number),), seconds, longest_s)


def _whole_parts(
    jobs: Sequence[JobProgress], fewest: int, left_s: float, latency: LatencyModel, group: int
) -> JoinedTasklets:
    """Return turns of whole parts; a job takes part from where the others have caught up with it
    until it is done.
    """
    first = {job.id: _parts_done(job) - fewest for job in jobs}
    ends = {job.id: first[job.id] + job.num_parts_left for job in jobs}
    seconds = longest_s = 0.0
    num_turns = 0
    # Between these turns, all are alike: what is left of a part is another number of rows only in a
    # job's first.
    cuts = sorted({*first.values(), *[turn + 1 for turn in first.values()], *ends.values()})
    for turn, end in pairwise(cuts):
        windows = [
            (job, job.num_rows_left if turn == first[job.id] else job.num_rows)
            for job in jobs
            if first[job.id] <= turn < ends[job.id]
        ]
        turn_s = latency.tasklets_s(windows)
        number = times(turn_s, left_s - seconds, end - turn)
        if not number:
            break
        seconds, longest_s, num_turns = (
            seconds + number * turn_s,
            max(longest_s, turn_s),
            num_turns + number,
        )
        # The time is up before the next cut.
        if number < end - turn:
            break
    counts = {job.id: max(0, min(num_turns, ends[job.id]) - first[job.id]) for job in jobs}
    pieces = [
        PlannedTasklets(job.id, job.num_rows, counts[job.id], group)
        for job in jobs
        if counts[job.id]
    ]
    return JoinedTasklets(tuple(pieces), seconds, longest_s)


def times(seconds: float, within_s: float, most: int) -> int:
    """Return how often something fits, `most` at most."""
    return most if most * seconds <= within_s else max(0, int(within_s / seconds))


def tasklet_rows(job: JobProgress, rows: int, num_tasklets: int) -> list[int]:
    """Return the rows of each of a job's next tasklets, at most this many, if it goes backward in
    windows of as many rows.
    """
    sizes: list[int] = []
    left = job.num_rows_left
    for _ in range(job.num_parts_left):
        sizes += [rows] * (left // rows) + [left % rows] * (left % rows > 0)
        left = job.num_rows
        if len(sizes) >= num_tasklets:
            break
    return sizes[:num_tasklets]


def least_advanced(jobs: Sequence[JobProgress]) -> list[JobProgress]:
    """Return the jobs that have done the fewest backward parts, or one more: these wait for one
    part at most.
    """
    fewest = min([_parts_done(job) for job in jobs])
    return [job for job in jobs if _parts_done(job) <= fewest + 1]


def is_before_backward(job: JobProgress) -> bool:
    """Return whether no tasklet of a job's pack has run."""
    return job.phase == "loss" or (_parts_done(job) == 0 and job.num_rows_left == job.num_rows)


def _parts_done(job: JobProgress) -> int:
    return job.info.counts.num_parts - job.num_parts_left


def _num_rows(job: JobProgress) -> int:
    return job.num_rows
