"""A job's states: the tables alone, over all that can be."""

from itertools import product

import pytest

from coserve.jobs.records import OVER
from coserve.jobs.state import TRANSITIONS, is_legal, next_action, wish_of

LIVING = tuple(status for status in TRANSITIONS if status not in OVER)
HOLDINGS = ("nothing", "running", "paused", "ended")
ALL = [
    (status, wish, holding, validated)
    for status, wish, holding, validated in product(LIVING, ("run", "rest", "end"), HOLDINGS, (False, True))
    # The engine is given jobs whose files have been read.
    if validated or (holding == "nothing" and status in ("validating_files", "paused"))
]


def do(action, status, holding):
    """What an action brings, with an engine and a store that do all that they are asked for."""
    told = {"tell_pause": "paused", "tell_resume": "running", "tell_cancel": "nothing", "start": "running"}
    if action in told:
        return status, told[action]
    written = {"write_validating": "validating_files", "read_files": "queued"}
    return written.get(action) or action.removeprefix("write_"), holding


@pytest.mark.parametrize(("status", "wish", "holding", "validated"), ALL)
def test_a_job_comes_to_what_is_wished_from_wherever_it_is(status, wish, holding, validated):
    seen = []
    while (action := next_action(status, wish=wish, holding=holding, is_validated=validated)) is not None:
        assert (status, holding) not in seen, "it turns in a circle"
        seen.append((status, holding))
        before = status
        status, holding = do(action, status, holding)
        validated = validated or action == "read_files"
        assert is_legal(before, status), (before, action, status)
    if holding == "ended":  # what came of it is still to be reported
        assert wish == "run" or status == {"rest": "paused", "end": "cancelled"}[wish]
        return
    assert status == {"run": "running", "rest": "paused", "end": "cancelled"}[wish]
    assert holding in {"run": ("running",), "rest": ("paused", "nothing"), "end": ("nothing",)}[wish]


@pytest.mark.parametrize("status", sorted(OVER))
def test_the_end_is_the_end(status):
    assert TRANSITIONS[status] == frozenset()
    assert next_action(status, wish="run", holding="running", is_validated=True) is None
    assert [other for other in TRANSITIONS if is_legal(status, other)] == [status]


def test_jobs_whose_engine_died_are_queued_again():
    assert next_action("running", wish=wish_of("running"), holding="nothing", is_validated=True) == "write_queued"
    assert next_action("queued", wish=wish_of("queued"), holding="nothing", is_validated=True) == "start"
    assert next_action("paused", wish=wish_of("paused"), holding="nothing", is_validated=True) is None


def test_an_engine_that_did_not_hear_of_a_pause_is_told_again():
    assert next_action("paused", wish=wish_of("paused"), holding="running", is_validated=True) == "tell_pause"
    assert next_action("running", wish=wish_of("running"), holding="paused", is_validated=True) == "tell_resume"
