"""Virtual time counters of tenants."""

import pytest

from coserve.scheduling.tenant_times import RECENT_S, TenantTimes


def test_a_tenant_counts_as_alone_soon_after_the_last_work_of_another():
    """Steps that are shared out are short, which costs a lone tenant's job a fifth of its speed and
    more."""
    times = TenantTimes()
    times.note_present({"a", "b"}, 0.0)
    times.note_present({"a"}, RECENT_S)
    assert times.are_shared
    times.note_present({"a"}, RECENT_S + 0.1)
    assert not times.are_shared
    assert RECENT_S <= 10


def test_a_tenant_that_comes_back_has_saved_up_no_credit():
    times = TenantTimes()
    times.note_present({"a", "b"}, 0.0)
    times.charge({"b": 0.1})
    times.note_present({"b"}, 1.0)
    times.charge({"b": 0.1})
    times.note_present({"a", "b"}, 2.0)
    assert times.used_s("a") == times.used_s("b") == 0.2


def test_seconds_count_by_weight():
    times = TenantTimes({"heavy": 2.0})
    times.note_present({"heavy", "light"}, 0.0)
    times.charge({"heavy": 0.2, "light": 0.1})
    assert times.used_s("heavy") == times.used_s("light")


def test_a_small_weight_and_a_long_step_leave_a_tenant_what_it_is_owed():
    times = TenantTimes({"light": 0.25})
    times.note_present({"light", "other"}, 0.0)
    times.charge({"other": 0.5})
    assert times.used_s("light") == times.used_s("other") - 0.5
    times.charge({"other": 0.2})
    times.charge({"other": 0.2})
    assert times.used_s("light") == pytest.approx(times.used_s("other") - 0.9)
