"""Places of requests that wait for their first token are divided among tenants."""

import pytest

from coserve.server.errors import ApiError
from coserve.server.tenancy.waiting import WaitingRequests


def arrive(waiting: WaitingRequests, tenant: str, number: int) -> int:
    """Return the number of requests of a tenant that find a place, one after the other."""
    for index in range(number):
        try:
            waiting.check(tenant)
        except ApiError:
            return index
        waiting.begin(f"{tenant}-{index}", tenant)
    return number


def test_a_tenant_that_is_alone_may_use_all_places():
    waiting = WaitingRequests(6)
    assert arrive(waiting, "a", 10) == 6


def test_a_tenant_that_uses_all_places_keeps_no_other_from_its_share():
    waiting = WaitingRequests(6)
    arrive(waiting, "a", 10)
    assert arrive(waiting, "b", 10) == 3
    assert arrive(waiting, "c", 10) == 2
    waiting.end("a-0")
    with pytest.raises(ApiError) as raised:
        waiting.check("a")
    assert (raised.value.status, raised.value.code) == (503, "overloaded")


def test_places_are_free_again_once_requests_have_ended():
    waiting = WaitingRequests(2)
    arrive(waiting, "a", 2)
    arrive(waiting, "b", 1)
    for request in ("a-0", "a-1", "b-0", "b-0"):
        waiting.end(request)
    assert arrive(waiting, "b", 10) == 2


def test_every_tenant_finds_a_place_where_tenants_outnumber_places():
    waiting = WaitingRequests(2)
    assert [arrive(waiting, f"tenant-{number}", 1) for number in range(5)] == [1] * 5
