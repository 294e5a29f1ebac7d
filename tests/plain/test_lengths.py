"""Which of many combinations tests try."""

from itertools import combinations, product
from pathlib import Path

import lengths
import pytest
from lengths import covering

CASES = list(product("abc", (0, 1), (False, True), "xyzw"))


@pytest.mark.parametrize("together", [1, 2, 3])
def test_any_values_that_a_number_of_settings_have_together_are_in_one_case(monkeypatch, together):
    monkeypatch.setattr(lengths, "_TRIES_ALL", False)
    found = covering(CASES, tuple, together=together)
    for places in combinations(range(4), together):
        assert {tuple(case[place] for place in places) for case in found} == {
            tuple(case[place] for place in places) for case in CASES
        }
    assert len(found) < len(CASES) and set(found) < set(CASES)


def test_cases_that_are_kept_are_taken_and_all_are_on_demand(monkeypatch):
    monkeypatch.setattr(lengths, "_TRIES_ALL", False)
    kept = ("c", 1, True, "w")
    assert kept in covering(CASES, tuple, together=1, keep=[kept])
    monkeypatch.setattr(lengths, "_TRIES_ALL", True)
    assert covering(CASES, tuple, together=1) == CASES


def test_files_that_take_longest_are_there():
    found = {path.stem for path in Path(lengths.__file__).parent.rglob("test_*.py")}
    assert set(lengths._LONGEST) <= found and len(set(lengths._LONGEST)) == len(lengths._LONGEST)
