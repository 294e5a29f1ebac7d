"""What jobs took of the time of those who wait."""

import pytest

from coserve.scheduling.attainment import JobsTime, jobs_seconds
from coserve.scheduling.plan import Plan


def test_who_comes_within_a_step_waits_for_the_rest_of_it():
    time = JobsTime()
    time.add(2.0, started_s=10.0, ended_s=14.0)
    assert [time.at(moment_s) for moment_s in (9.0, 10.0, 13.0, 14.0, 20.0)] == [0.0, 0.0, 1.5, 2.0, 2.0]


def test_a_step_may_take_no_time_and_who_comes_before_it_waits_for_all_of_it():
    time = JobsTime()
    assert time.at(-1.0) == 0.0
    time.add(2.0, started_s=10.0, ended_s=10.0)
    assert (time.at(9.0), time.at(10.0)) == (0.0, 2.0)


def test_a_moment_in_which_the_machine_faltered_is_nobodys_need():
    """The first step of a process takes many times its prediction; what requests need of it is twice that at most."""
    plan = Plan(forward_s=0.1, window_s=0.02)
    assert jobs_seconds(plan, step_s=0.15, forward_s=0.15) == pytest.approx(0.03)
    assert jobs_seconds(plan, step_s=1.8, forward_s=1.8) == pytest.approx(1.8 - 0.2 * 0.8)
