"""Plans of the default policy for several tenants: order within a tenant, batch work, pages, length
of steps."""

from collections import Counter
from itertools import pairwise

from tenant_views import NOW_S, decoding, job, line, plan, prompt, running_line

from coserve.scheduling.plan import Plan, SloUse


def prefilled(made: Plan) -> list[str]:
    return [rows.item for rows in made.rows if rows.kind == "prefill"]


def test_an_infeasible_request_gets_its_rows_after_a_prompt_of_its_tenant_that_can_be_in_time():
    lost, timely = prompt("lost", "a", 1000, arrival_s=NOW_S - 3), prompt("timely", "a", 40)
    made = plan({"a": 0.0, "b": 0.0}, requests=(lost, timely), jobs=(job("j", "b"),))
    assert prefilled(made)[0] == "timely"


def test_an_infeasible_request_is_admitted_after_a_request_of_its_tenant_that_can_be_in_time():
    lost, timely = prompt("lost", "a", 1000, arrival_s=NOW_S - 3), prompt("timely", "a", 40)
    made = plan(
        {"a": 0.0, "b": 0.0}, waiting=(lost, timely), jobs=(job("j", "b"),), num_free_pages=20
    )
    assert made.admit == ("timely",)


def test_batch_work_is_admitted_by_tenant_in_turn():
    lines = [line(f"a{number}", "a") for number in range(50)]
    later = [line(f"b{number}", "b", arrival_s=NOW_S + 1) for number in range(3)]
    made = plan({"a": 0.0, "b": 0.0}, batch_waiting=(*lines, *later), max_requests=6)
    assert Counter(id[0] for id in made.admit) == {"a": 3, "b": 3}


def test_batch_work_takes_a_slot_of_a_tenant_that_has_many():
    many = [running_line(f"a{number}", "a") for number in range(6)]
    made = plan(
        {"a": 0.0, "b": 0.0}, batch=tuple(many), batch_waiting=(line("b0", "b"),), max_requests=6
    )
    assert made.admit == ("b0",) and made.preempt == ("a5",)


def test_batch_work_waits_where_a_tenant_has_served_more_than_its_own():
    many = [running_line(f"a{number}", "a") for number in range(6)]
    made = plan(
        {"a": 0.0, "b": 1.0}, batch=tuple(many), batch_waiting=(line("b0", "b"),), max_requests=6
    )
    assert not made.admit and not made.preempt


def test_waiting_requests_of_a_tenant_with_many_pages_do_not_stop_batch_work_of_another():
    running, waiting = decoding("r", "a", num_held=80), prompt("w", "a", 800)
    made = plan(
        {"a": 0.0, "b": 0.0},
        requests=(running,),
        waiting=(waiting,),
        batch_waiting=(line("b0", "b"),),
        num_free_pages=20,
        num_pages=100,
    )
    assert made.admit == ("b0",)


def test_a_request_takes_the_slot_of_batch_work_of_its_own_tenant_first():
    lines = (running_line("a0", "a"), running_line("b0", "b"), running_line("b1", "b"))
    made = plan({"a": 0.0, "b": 0.0}, batch=lines, waiting=(prompt("w", "a", 40),), max_requests=3)
    assert made.admit == ("w",) and made.preempt == ("a0",)


def test_a_pack_within_its_tenants_share_is_not_dropped_for_a_tenant_that_would_then_have_more():
    mine, waiting = decoding("b0", "b", num_held=30), prompt("w", "b", 16 * 16)
    dropped = {}
    for num_pages in (48, 55):
        made = plan(
            {"a": 0.0, "b": 0.0},
            requests=(mine,),
            waiting=(waiting,),
            jobs=(job("j", "a", num_pages=num_pages),),
            num_free_pages=15,
            num_pages=100,
        )
        dropped[num_pages] = made.drop
    assert dropped == {48: (), 55: ("j",)}


def test_nothing_makes_room_for_a_request_that_finds_too_little():
    running = tuple(decoding(f"a{number}", "a", num_held=10) for number in range(9))
    made = plan(
        {"a": 0.0, "b": 0.0},
        requests=running,
        waiting=(prompt("w", "b", 1200),),
        num_free_pages=10,
        num_pages=100,
    )
    assert not made.preempt and not made.admit


def test_no_slot_is_vacated_for_a_request_that_finds_too_few_pages():
    running = (decoding("a0", "a", num_held=22), decoding("a1", "a", num_held=23))
    lines = tuple(running_line(f"b{number}", "b") for number in range(6))
    made = plan(
        {"a": 0.0, "b": 0.0, "c": 0.0},
        requests=running,
        waiting=(prompt("w", "a", 30 * 16),),
        batch=lines,
        batch_waiting=(line("b6", "b"),),
        jobs=(job("j", "c", num_pages=30),),
        max_requests=8,
        num_free_pages=13,
        num_pages=100,
    )
    assert not made.preempt and not made.admit


def test_no_request_is_preempted_for_its_slot_by_one_that_finds_too_few_pages():
    running = tuple(decoding(f"b{number}", "b", num_held=4) for number in range(6))
    made = plan(
        {"a": 0.0, "b": 0.0},
        requests=running,
        waiting=(prompt("w", "a", 80 * 16),),
        max_requests=6,
        num_free_pages=20,
        num_pages=100,
    )
    assert not made.preempt and not made.admit


def test_of_tenants_that_hold_as_much_the_one_that_was_admitted_first_makes_room():
    """Whatever their names, whose hashes differ from process to process."""
    for first, second in pairwise("abcdefghijklmnop"):
        running = tuple(decoding(name, name, num_held=10, num_pages=1) for name in (first, second))
        made = plan({first: 0.0, second: 0.0}, requests=running, num_free_pages=0, num_pages=20)
        assert made.preempt == (first,)


def test_a_large_line_of_a_batch_is_not_overtaken_by_small_ones_of_a_tenant_that_was_served_more():
    large = prompt("large", "a", 60 * 16, batch_due_s=NOW_S + 1000)
    admitted = {}
    for used_s in (0.0, 0.5):
        made = plan(
            {"a": used_s, "b": 0.1},
            batch=tuple(running_line(f"b{number}", "b", num_held=25) for number in range(2)),
            batch_waiting=(large, line("b2", "b")),
            num_free_pages=50,
            num_pages=100,
        )
        admitted[used_s] = made.admit
    assert admitted == {0.0: (), 0.5: ("b2",)}


def test_a_tenant_whose_batch_work_made_room_for_growing_requests_gets_no_new_line_in_the_same_plan():
    growing = decoding("a0", "a", num_pages=8, num_held=8)
    lines = tuple(running_line(f"b{number}", "b", num_held=20) for number in range(4))
    made = plan(
        {"a": 0.0, "b": 0.0},
        requests=(growing,),
        batch=lines,
        batch_waiting=(line("b4", "b"),),
        num_free_pages=4,
        num_pages=100,
    )
    assert made.preempt == ("b3",) and not made.admit


def test_a_pack_that_makes_room_in_the_plan_in_which_it_begins_is_not_begun():
    made = plan(
        {"a": 0.0, "b": 0.1},
        requests=(decoding("a0", "a", num_held=10),),
        jobs=(job("large", "a", "pack", num_pages=50), job("small", "b", "pack", num_pages=42)),
        num_free_pages=90,
        num_pages=100,
    )
    assert made.begin == ("small",) and not made.drop


def test_a_step_of_jobs_of_several_tenants_is_as_short_as_of_one_where_requests_need_nearly_all_of_their_ttft():
    need = SloUse(ttft=0.9)
    steps = []
    for tenants in ({"a": 0.0}, {"a": 0.0, "b": 0.0}):
        jobs = tuple([job(f"j{name}", name) for name in tenants])
        steps.append(plan(tenants, jobs=jobs, slo_use=need))
    one, two = steps
    assert 0 < two.prediction.backward_s <= one.prediction.backward_s + 0.01
