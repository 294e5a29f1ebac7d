"""A pack leaves requests the pages that they will want until it could have given its own back
(HARLI section 4.4), and is begun when others leave the device time for it.
"""

import pytest
from msgspec import structs
from progress import make_job, make_request

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.memory import ENOUGH_PACK_ROWS, SPARE_PAGES, MemoryPlan
from coserve.scheduling.plan import JobPhase, JobProgress, View

BLOCK, PACK_PAGES, NUM_REQUESTS, TPOT_S = 16, 10, 3, 0.05
COUNTS = JobCounts(
    flops_per_row=1.0,
    backward_flops_per_row=1.0,
    backward_flops_per_pair=1.0,
    num_parts=1,
    num_bypasses=1,
    num_parameters=1,
)


def is_begun(num_free_pages: int, *, give_back_s: float, num_left: int = 10_000) -> bool:
    requests = tuple(
        make_request(
            f"r{i}",
            num_rows=1,
            num_past=100,
            num_output=50,
            arrival_s=0.0,
            first_token_s=1.0,
            last_token_s=3.0,
            ttft_s=2.0,
            tpot_s=TPOT_S,
            num_left=num_left,
        )
        for i in range(NUM_REQUESTS)
    )
    plan = MemoryPlan(
        View(
            now_s=3.0,
            requests=requests,
            jobs=(
                make_job(
                    "job",
                    "pack",
                    num_rows=100,
                    num_rows_left=100,
                    num_parts_left=1,
                    mean_context_len=10.0,
                    counts=COUNTS,
                    num_pages=PACK_PAGES,
                ),
            ),
            num_free_pages=num_free_pages,
            block_tokens=BLOCK,
            give_back_s=give_back_s,
        )
    )
    plan.begin_packs()
    return plan.begin == ["job"]


@pytest.mark.parametrize(
    ("give_back_s", "num_tokens"),
    [(0.0, SPARE_PAGES * BLOCK), (1.0, SPARE_PAGES * BLOCK), (8.0, 161), (30.0, 601)],
    ids=lambda value: str(value),
)
def test_the_reserve_is_what_requests_take_until_pages_are_back(give_back_s, num_tokens):
    reserve = NUM_REQUESTS * -(-num_tokens // BLOCK)
    assert is_begun(PACK_PAGES + reserve, give_back_s=give_back_s)
    assert not is_begun(PACK_PAGES + reserve - 1, give_back_s=give_back_s)


def test_no_request_has_more_reserved_than_it_has_left():
    assert is_begun(PACK_PAGES + NUM_REQUESTS * 2, give_back_s=30.0, num_left=2 * BLOCK)


def begun(*jobs: JobProgress) -> list[str]:
    plan = MemoryPlan(
        View(now_s=0.0, jobs=jobs, num_free_pages=10_000, block_tokens=BLOCK, tpot_s=TPOT_S)
    )
    plan.begin_packs()
    return plan.begin


def job(name: str, num_rows: int, phase: JobPhase = "pack") -> JobProgress:
    return make_job(
        name,
        phase,
        num_rows=num_rows,
        num_rows_left=num_rows,
        num_parts_left=1,
        mean_context_len=10.0,
        counts=COUNTS,
        num_pages=PACK_PAGES,
    )


def test_no_more_packs_are_in_memory_than_fill_the_device():
    half = ENOUGH_PACK_ROWS // 2
    assert begun(job("a", half), job("b", half), job("c", half)) == ["a", "b"]
    assert begun(job("a", half, "backward"), job("b", half), job("c", half)) == ["b"]
    assert begun(job("a", 2 * ENOUGH_PACK_ROWS)) == ["a"], "a large one alone"
    assert begun(job("a", 1, "forward"), job("b", 2 * ENOUGH_PACK_ROWS)) == []


def test_a_large_pack_has_its_turn_before_small_ones_that_would_fit():
    assert begun(job("a", 100, "backward"), job("b", ENOUGH_PACK_ROWS), job("c", 10)) == []


def test_a_job_that_is_due_an_optimizer_step_keeps_its_turn():
    """Its next pack would be too late otherwise, again and again, if others have larger ones."""
    assert begun(job("a", 0, "update"), job("b", 100)) == []
    assert begun(job("b", 100), job("a", 0, "update")) == ["b"]


def test_a_job_whose_optimizer_step_finds_no_time_does_not_stop_others():
    waits = structs.replace(job("a", 0, "update"), waited_s=100.0)
    assert begun(waits, job("b", 100)) == ["b"]
