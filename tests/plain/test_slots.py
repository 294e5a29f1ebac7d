"""Who trains next."""

from coserve.jobs.slots import Places


def test_tenants_take_turns_and_each_of_their_jobs_comes_in_order():
    places = Places(2, lambda tenant: None)
    assert places.ask("a1", "a") and places.ask("a2", "a")
    for job, tenant in (("a3", "a"), ("a4", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
        assert not places.ask(job, tenant)
    assert [places.position(job) for job in ("a3", "a4", "b1", "b2", "c1", "a1")] == [4, 5, 1, 3, 2, None]
    order: list[str] = []
    for _ in range(5):
        places.leave("a1" if not order else order[-1])
        next = places.next()
        assert next is not None and places.position(next) == 1
        assert places.ask(next, next[0]) and places.next() is None
        order.append(next)
    assert order == ["b1", "c1", "b2", "a3", "a4"]


def test_a_tenant_at_its_own_limit_holds_up_no_other():
    places = Places(3, {"a": 1, "b": None}.get)
    assert places.ask("a1", "a")
    assert not places.ask("a2", "a")
    assert places.ask("b1", "b") and places.ask("b2", "b")
    places.leave("b1")
    assert places.next() is None, "the place is free, but not for this tenant"
    places.leave("a1")
    assert places.next() == "a2"


def test_who_gives_up_waiting_is_not_given_a_place():
    places = Places(1, lambda tenant: None)
    assert places.ask("a", "t") and places.ask("a", "t")
    assert not places.ask("b", "t")
    places.leave("b")
    places.leave("a")
    assert places.next() is None and places.position("b") is None
