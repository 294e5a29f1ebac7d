"""Some of the storms of poisoned batch lines of `make storm`; see `tests/storm/poisoned.py`."""

import pytest
from storm.poisoned import run_poisoned_storm


@pytest.mark.parametrize("seed", range(12))
def test_storms_of_poisoned_lines(seed: int):
    done, broken = run_poisoned_storm(seed)
    assert not broken
    assert done["servers"] and done["answered"] + done["set aside"]
