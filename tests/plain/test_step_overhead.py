"""What steps take beside their sections, as it is learned."""

import pytest

from coserve.scheduling.corrections import StepOverhead
from coserve.scheduling.step_time import StepTime


def test_it_is_learned_apart_for_steps_in_which_packs_begin():
    overhead = StepOverhead()
    assert overhead.seconds(begins=False) == overhead.seconds(begins=True) == 0
    for _ in range(60):
        overhead.observe(1e-3, begins=False)
    assert overhead.seconds(begins=False) == pytest.approx(1e-3, rel=0.02)
    assert overhead.seconds(begins=True) == overhead.seconds(begins=False), "none was seen"
    for _ in range(60):
        overhead.observe(8e-3, begins=True)
    assert overhead.seconds(begins=True) == pytest.approx(8e-3, rel=0.02)
    assert overhead.seconds(begins=False) == pytest.approx(1e-3, rel=0.02)


def test_a_step_that_was_held_up_counts_little():
    overhead = StepOverhead()
    overhead.observe(10.0, begins=False)
    assert overhead.seconds(begins=False) < 5e-3
    for _ in range(60):
        overhead.observe(1e-3, begins=False)
    before_s = overhead.seconds(begins=False)
    overhead.observe(10.0, begins=False)
    assert before_s < overhead.seconds(begins=False) < 1.2 * before_s
    overhead.observe(-1.0, begins=False)
    assert overhead.seconds(begins=False) > 0


def test_a_step_has_less_time_for_jobs_by_it():
    free, real = (
        StepTime(overhead_s=seconds, forward_s=0.02, update_s=0.01, until_s=0.1)
        for seconds in (0.0, 0.005)
    )
    assert real.whole_s == pytest.approx(free.whole_s + 0.005)
    assert real.step_s == pytest.approx(free.step_s + 0.005)
    assert real.left_s(0.1) == pytest.approx(free.left_s(0.1) - 0.005)
    limits = [time.backward_limit_s() for time in (free, real)]
    assert limits[1] == pytest.approx(limits[0] - 0.005)
