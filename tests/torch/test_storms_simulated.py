"""Some of the storms of `make storm`, those of the first seeds; see `tests/storm`."""

import pytest
from storm.faults import FAULTS
from storm.operations import OPERATIONS
from storm.simulated import Report, run_storm

from coserve.scheduling.policies import policy_names

pytestmark = pytest.mark.long


def test_storms():
    """No invariant is broken, and they reach what they are about: some faults are rare, and which
    storms these hit depends on every step of a policy.
    """
    report = Report()
    for seed in range(30):
        run_storm(seed, report, num_actions=500)
    for seed in range(30, 60):
        if report.faults.keys() == FAULTS.keys():
            break
        run_storm(seed, report, num_actions=2000)
    assert report.policies.keys() >= set(policy_names())
    assert report.operations.keys() >= {operation.__name__ for operation in OPERATIONS}
    assert report.faults.keys() == FAULTS.keys()
    ends = {f"requests: {end}" for end in ("length", "stop", "cancelled", "error")}
    ends |= {f"jobs: {end}" for end in ("succeeded", "cancelled", "failed")}
    assert report.counts.keys() >= ends


def test_the_same_seed_gives_the_same_storm():
    first, second = Report(), Report()
    for report in (first, second):
        run_storm(3, report, num_actions=500)
        report.computed_s = 0.0
    assert first == second


def test_storms_that_found_something():
    """5404: a request was opened and preempted in one plan, and its pages went to a pack, which is
    begun before the device hears of either: it was then told to open a request on pages with
    something else in them.
    """
    for seed in (5404,):
        run_storm(seed, Report(), num_actions=2000)
