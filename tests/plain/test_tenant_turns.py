"""Work of tenants on threads that they share."""

from threading import Event

from coserve.server.tenancy.task_turns import TenantTurns


def test_tenants_take_turns_however_much_work_one_of_them_has():
    turns, begin, order = TenantTurns(1, "test"), Event(), list[str]()
    first = turns.submit("flood", lambda: begin.wait(30))
    flood = [turns.submit("flood", lambda: order.append("flood")) for _ in range(20)]
    calm = [turns.submit("calm", lambda: order.append("calm")) for _ in range(2)]
    begin.set()
    for each in (first, *flood, *calm):
        each.result(30)
    assert order[:4] in (["flood", "calm", "flood", "calm"], ["calm", "flood", "calm", "flood"])
    assert len(order) == 22
    turns.shutdown()


def test_what_goes_wrong_is_the_callers_alone_and_what_nobody_wants_is_not_done():
    turns, begin = TenantTurns(1, "test"), Event()
    first = turns.submit("a", lambda: begin.wait(30))
    fails, unwanted = turns.submit("a", lambda: 1 / 0), turns.submit("a", lambda: 2)
    last = turns.submit("a", lambda: 3)
    assert unwanted.cancel()
    begin.set()
    assert isinstance(fails.exception(30), ZeroDivisionError)
    assert first.result(30) and last.result(30) == 3
    turns.shutdown()
