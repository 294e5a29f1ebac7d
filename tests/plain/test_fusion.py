"""Which jobs are fused into hybrid tasks, and which take turns: against every partition, and in
plans."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from progress import make_job

from coserve.scheduling import JobProgress, LatencyModel, Plan, PlannedTasklets, View, make_policy
from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.fusion import hybrid_tasks, joined_tasklets
from coserve.scheduling.profile import Curve, Profile

COUNTS = JobCounts(
    flops_per_row=1.0,
    backward_flops_per_row=1.0,
    backward_flops_per_pair=1.0,
    num_parts=4,
    num_bypasses=7,
    num_parameters=100,
)


def latency(*seconds: float, rows: Sequence[int] = (1, 64, 256, 4096)) -> LatencyModel:
    """By seconds of a tasklet of these numbers of rows; all else is cheap."""
    cheap = Curve(rows=(1, 4096), seconds=(1e-4, 1e-3))
    return LatencyModel(
        Profile(
            model=ModelCounts(
                flops_per_row=1.0, flops_per_pair=1.0, head_flops_per_row=1.0, kv_bytes_per_key=1
            ),
            job=COUNTS,
            forward=cheap,
            head=cheap,
            loss=cheap,
            backward=Curve(rows=tuple(rows), seconds=seconds),
            s_per_pair=0.0,
            backward_s_per_pair=1e-9,
            s_per_key=0.0,
            s_per_span=0.0,
            s_per_bypass=0.0,
            s_per_window_row=0.0,
            s_per_parameter=0.0,
            update_s=1e-4,
        )
    )


FLAT = latency(1.0, 1.0, 1.0, 16.0)  # up to 256 rows cost as much as one
STRAIGHT = latency(1 / 64, 1.0, 4.0, 64.0)


def job(
    id: str, phase: str = "backward", rows: int = 64, left: int | None = None, parts_left: int = 4
) -> JobProgress:
    return make_job(
        id,
        phase,
        num_rows=rows,
        num_rows_left=rows if left is None else left,
        num_parts_left=parts_left,
        mean_context_len=32.0,
        counts=COUNTS,
    )


def groups_of(tasks: dict[str, int]) -> set[frozenset[str]]:
    return {frozenset(name for name in tasks if tasks[name] == number) for number in tasks.values()}


def plan(policy: str, *jobs: JobProgress, by: LatencyModel = FLAT) -> Plan:
    return make_policy(policy).plan(View(now_s=1.0, jobs=jobs, ttft_s=1e6, tpot_s=1e5), by)


def test_short_packs_are_fused_where_their_weights_are_read_once_and_long_ones_take_turns():
    short, long = [job(f"s{i}") for i in range(4)], [job(f"l{i}", rows=1024) for i in range(3)]
    assert groups_of(hybrid_tasks([*short, *long], FLAT, max_rows=2048)) == {
        frozenset({"s0", "s1", "s2", "s3"}),
        *(frozenset({name}) for name in ("l0", "l1", "l2")),
    }
    assert len(groups_of(hybrid_tasks(short, STRAIGHT, max_rows=2048))) == 4, "nothing is gained"
    assert len(groups_of(hybrid_tasks(short, FLAT, max_rows=128))) == 2, (
        "side by side there is room for two packs"
    )
    assert (
        hybrid_tasks([], FLAT, max_rows=1) == {}
        and len(hybrid_tasks([job("j")], FLAT, max_rows=1)) == 1
    )


def test_packs_take_turns_where_joining_them_is_measured_to_add_more_than_it_saves():
    packs = [job(f"j{i}") for i in range(4)]
    for joining, number in ((1.0, 1), (3.9, 1), (4.1, 4)):  # four of them cost as much as one here
        measured = LatencyModel(replace(FLAT.profile, joining=joining))
        assert len(groups_of(hybrid_tasks(packs, measured, max_rows=2048))) == number


@pytest.mark.parametrize("seed", range(20))
def test_no_other_partition_of_the_sorted_jobs_takes_less_time(seed):
    rng = Random(seed)
    jobs = [
        job(f"j{i}", rng.choice(("forward", "loss", "backward")), rng.randint(1, 600))
        for i in range(6)
    ]
    model = latency(*sorted(rng.uniform(0.5, 8) for _ in range(4)))
    ordered, max_rows = (
        sorted(jobs, key=lambda each: each.num_rows),
        rng.choice((300, 1000, 10_000)),
    )

    def seconds(group: Sequence[JobProgress]) -> float:
        num_rows = sum(each.num_rows for each in group)
        if len(group) > 1 and num_rows > max_rows:
            return float("inf")
        return model.batch_s(num_rows, num_rows) * (
            model.profile.joining if len(group) > 1 else 1.0
        )

    best = min(
        sum(seconds(ordered[a:b]) for a, b in pairwise((0, *cuts, 6)))
        for number in range(6)
        for cuts in combinations(range(1, 6), number)
    )
    found = groups_of(hybrid_tasks(jobs, model, max_rows=max_rows))
    assert sum(
        seconds([each for each in jobs if each.id in group]) for group in found
    ) == pytest.approx(best)


def test_jobs_of_a_hybrid_task_go_backward_together():
    made = plan(
        "tuning-only", job("a"), job("b", left=10), job("c", "loss"), job("d", parts_left=2)
    )
    assert {part.job: (part.rows, part.num_tasklets) for part in made.tasklets} == {
        "a": (64, 4),
        "b": (64, 4),
        "c": (64, 4),
        "d": (64, 2),
    }
    groups = {part.job: part.group for part in made.tasklets}
    assert groups["a"] is not None and groups["a"] == groups["b"] == groups["c"] != groups["d"]
    apart = plan("tuning-only", job("a"), job("b"), by=STRAIGHT)
    assert [part.group for part in apart.tasklets] == [None, None]


def test_who_was_served_more_waits_at_the_loss_for_those_who_are_still_forward():
    young, old = job("young", "forward"), job("old", "loss")
    made = plan("tuning-only", young, old)
    assert [rows.item for rows in made.rows] == ["young"] and not made.losses
    assert [piece.job for piece in plan("tuning-only", old, young).losses] == ["old"], (
        "it was served less"
    )
    assert plan("tuning-only", young, old, by=STRAIGHT).losses, "nothing is gained by waiting"
    midway = plan("tuning-only", young, job("old", parts_left=3))
    assert midway.tasklets, "what is under way continues"
    unable = View(now_s=1.0, jobs=(young, old), max_rows=0)
    assert make_policy("tuning-only").plan(unable, FLAT).losses, (
        "nobody waits for one that does not move"
    )


def test_a_job_that_is_one_part_ahead_waits_for_the_others():
    slow, ahead = job("slow", left=20), job("ahead", parts_left=3)
    found = joined_tasklets([ahead, slow], 1e9, FLAT, group=5)
    assert found is not None
    assert {part.job: (part.num_tasklets, part.group) for part in found.tasklets} == {
        "slow": (4, 5),
        "ahead": (3, 5),
    }
    alone_s, both_s = FLAT.tasklets_s([(slow, 20)]), FLAT.tasklets_s([(slow, 64), (ahead, 64)])
    assert found.seconds == pytest.approx(alone_s + 3 * both_s)
    once = joined_tasklets([ahead, slow], alone_s * 1.01, FLAT, group=5)
    assert once is not None and [*once.tasklets] == [PlannedTasklets("slow", 64, 1, 5)]
    assert joined_tasklets([ahead, slow], 0.5, FLAT, group=5) is None
    halves = joined_tasklets([job("a"), job("b", rows=40)], 1.0, STRAIGHT, group=1)
    assert (
        halves is not None
        and sum(part.rows for part in halves.tasklets) < 104
        and halves.seconds <= 1.0
    )


def test_jobs_join_and_leave_between_any_two_steps():
    jobs = [job(f"j{i}", parts_left=4 - i % 2) for i in range(5)]
    for number in range(1, 6):
        made = plan("tuning-only", *jobs[:number])
        assert {part.job for part in made.tasklets} == {each.id for each in jobs[:number]}
        assert len({part.group for part in made.tasklets}) == 1
