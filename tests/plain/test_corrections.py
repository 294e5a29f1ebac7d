"""Corrections that are kept between steps are those that would be worked out anew."""

from random import Random

import pytest

from coserve.scheduling.corrections import Corrections

SECTIONS = "forward", "loss", "backward", "update"


def observed(corrections: Corrections, random: Random, *, noise: float) -> None:
    """A step with some sections, each predicted at the right seconds times noise."""
    for section in SECTIONS:
        if random.random() < 0.5:
            rows, windows = random.choice([1, 30, 500]), random.random() < 0.5
            predicted_s = random.uniform(0.001, 0.1)
            measured_s = predicted_s * random.lognormvariate(0.0, noise)
            corrections.observe(
                section, rows, windows, predicted_s=predicted_s, measured_s=measured_s
            )
    corrections.observe_step(predicted_s=1.0, measured_s=random.lognormvariate(0.0, noise))


def all_of(corrections: Corrections) -> list[float]:
    sizes = [
        (section, rows, windows)
        for section in SECTIONS
        for rows in (1, 30, 500)
        for windows in (False, True)
    ]
    return [corrections.of(*size) for size in sizes] + [
        corrections.of_section(each) for each in (*SECTIONS, "")
    ]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(8))
def test_what_was_asked_before_changes_nothing(seed, noise):
    asked, unasked = Corrections(), Corrections()
    randoms = Random(seed), Random(seed)
    # Now and then a step is not as predicted, so that factors of one kind move, and others only
    # age.
    noises = [noise if Random(f"{seed} {step}").random() < 0.3 else 0.0 for step in range(40)]
    for each in noises:
        all_of(asked)
        observed(asked, randoms[0], noise=each)
        all_of(asked)
        observed(unasked, randoms[1], noise=each)
    assert all_of(asked) == all_of(unasked)
    for corrections in (asked, unasked):
        corrections.refresh()
    assert all_of(asked) == all_of(unasked)


def test_a_factor_gives_way_with_age_although_nothing_moves():
    corrections = Corrections()
    corrections.observe("forward", 1, False, predicted_s=1.0, measured_s=1.5)
    corrections.observe("forward", 500, False, predicted_s=1.0, measured_s=1.0)
    before = corrections.of("forward", 1, False)
    assert corrections.of("forward", 1, False) == before
    corrections.observe_step(predicted_s=1.0, measured_s=1.0)
    assert corrections.of("forward", 1, False) != before
