"""What was taken of the time of those who wait, and what they needed themselves."""

from itertools import pairwise

import pytest

from coserve.scheduling.plan import Plan, Prediction, SloUse
from coserve.scheduling.slo.headroom import SloHeadroom
from coserve.scheduling.slo.taken_time import Taken, TakenTime, taken_of


def test_who_comes_within_a_step_waits_for_the_rest_of_it():
    time = TakenTime()
    time.add(Taken(2.0, -1.0), started_s=10.0, ended_s=14.0)
    found = [time.at(moment_s) for moment_s in (9.0, 10.0, 13.0, 14.0, 20.0)]
    assert found == [(0.0, 0.0), (0.0, 0.0), (1.5, -0.75), (2.0, -1.0), (2.0, -1.0)]


def test_a_step_may_take_no_time_and_who_comes_before_it_waits_for_all_of_it():
    time = TakenTime()
    assert time.at(-1.0) == Taken()
    time.add(Taken(2.0), started_s=10.0, ended_s=10.0)
    assert (time.at(9.0), time.at(10.0)) == (Taken(), Taken(2.0))


def test_what_jobs_took_and_what_the_machine_did():
    plan = Plan(prediction=Prediction(forward_s=0.1, window_s=0.02, forward_correction=2.0))
    assert taken_of(plan, step_s=0.3, forward_s=0.1) == pytest.approx((0.22, 0.04))
    assert taken_of(plan, step_s=1.8, forward_s=1.8) == pytest.approx((0.36, 1.44 - 0.04))
    assert taken_of(Plan(), step_s=0.3, forward_s=0.0) == (0.3, 0.0)


def needs(
    slowness: list[float], *, decode_s: float = 0.04, tpot_s: float = 0.1, steps: int = 30
) -> list[SloUse]:
    """After each of some requests, one after the other, that decode alone: that took these many
    times what the profile says.
    """
    need, time, now_s, found = SloHeadroom(), TakenTime(), 0.0, list[SloUse]()
    for times in slowness:
        start_s, before = now_s, time.total
        for _ in range(steps):
            plan = Plan(prediction=Prediction(forward_s=decode_s, decode_share=decode_s / tpot_s))
            ended_s = now_s + times * decode_s
            taken = taken_of(plan, step_s=ended_s - now_s, forward_s=ended_s - now_s)
            time.add(taken, started_s=now_s, ended_s=ended_s)
            need.add_step(plan, taken, started_s=now_s, ended_s=ended_s)
            now_s = ended_s
        own_s = now_s - start_s - sum(time.total.since(before))
        need.add_end(now_s, own_s / steps / tpot_s)
        found.append(need.use(now_s))
    return found


def test_a_minute_in_which_the_machine_was_slow_says_nothing_about_the_minutes_after():
    """Another process had it, or memory was touched for the first time: with few requests the
    slowest one counts, for a quarter of an hour, and jobs would stand still for as long.
    """
    found = needs([1.0, 1.0, 3.0, 3.0, 3.0] + [1.0] * 20)
    assert all(each.tpot == pytest.approx(0.4) and each.late_share == 0 for each in found[:2])
    slow = found[4]
    assert slow.tpot > 0.8 and slow.time > 0.8, "while it is slow, the SLO is near"
    assert all(later.tpot <= earlier.tpot for earlier, later in pairwise(found[4:]))
    assert found[-1].tpot == pytest.approx(0.4, rel=0.1) and found[-1].time == pytest.approx(
        0.4, rel=0.3
    )


def test_what_99_of_100_need_is_known_after_some_hundred_requests_or_two_minutes():
    many, few = SloHeadroom(), SloHeadroom()
    assert many.use(5.0).known == 0
    for index in range(256):
        many.add_end(5.0, 0.5)
        assert many.use(5.0).known == (index + 1) / 256
    few.add_end(5.0, 0.5)
    assert (
        0 < few.use(5.0).known < 0.01 and few.use(65.0).known == 0.5 and few.use(200.0).known == 1
    )
    assert few.use(2000.0).known == 0, "it was a long time ago"


def test_one_step_that_was_held_up_is_nobodys_need():
    need = SloHeadroom()
    plan = Plan(prediction=Prediction(forward_s=0.4, prefill_s=0.4))
    taken = taken_of(plan, step_s=4.0, forward_s=4.0)
    need.add_step(plan, taken, started_s=0.0, ended_s=4.0)
    need.add_first_token(4.0, (4.0 - sum(taken)) / 2.0)
    assert need.use(4.0).ttft == pytest.approx(2 * 0.4 / 2.0)


def test_a_profile_that_is_wrong_does_not_matter():
    """All is seen at the speed of now."""
    (*_, right), (*_, wrong) = needs([1.0] * 4), needs([1 / 3] * 4, decode_s=0.12)
    assert wrong.tpot == pytest.approx(right.tpot, rel=0.05) and wrong.time == pytest.approx(
        right.time, rel=0.05
    )


def test_a_clock_that_stands_still_is_no_infinitely_fast_device():
    need, plan = SloHeadroom(), Plan(prediction=Prediction(forward_s=0.1, decode_share=0.5))
    for _ in range(2000):
        need.add_step(plan, taken_of(plan, step_s=0.0, forward_s=0.0), started_s=1.0, ended_s=1.0)
    need.add_end(1.0, 0.5)
    assert 0 < need.use(1.0).tpot < 0.5
