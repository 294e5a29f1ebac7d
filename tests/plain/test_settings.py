"""What all settings share: checks of numbers, and the home directory."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import coserve
from coserve.discovery import variant_names
from coserve.home import home_directory
from coserve.scheduling.plan import Plan
from coserve.scheduling.policies.base import Policy
from coserve.settings import check_whole, is_whole
from coserve.tuning.config import TuningConfig

ROOT = Path(coserve.__file__).parent


@pytest.mark.parametrize("value", [True, 1.0, "1", None, float("nan"), -1])
def test_what_is_no_whole_number_in_range_is_refused_with_the_range(value):
    with pytest.raises(
        ValueError, match=f"^r must be a whole number of at least 0, not {re.escape(repr(value))}$"
    ):
        check_whole("r", value, 0)


def test_bounds_belong_to_the_range():
    assert [number for number in range(5) if is_whole(number, 1, 3)] == [1, 2, 3]
    check_whole("r", 3, 1, 3)
    with pytest.raises(ValueError, match=r"^r must be a whole number from 1 to 3, not 4$"):
        check_whole("r", 4, 1, 3)


def test_a_seed_is_one_that_generators_take():
    assert TuningConfig(seed=2**63 - 1).seed == 2**63 - 1
    for seed in (2**63, 2**64, -1):
        with pytest.raises(
            ValueError, match=rf"^seed must be a whole number from 0 to {2**63 - 1}, not {seed}$"
        ):
            TuningConfig(seed=seed)


def test_every_range_of_whole_numbers_is_checked_by_the_one_function():
    copies = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(
            r"isinstance\([\w.\[\]]+, int\) or isinstance\([\w.\[\]]+, bool\)", path.read_text()
        )
    ]
    assert copies == []


def test_a_field_that_is_no_setting_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Mine(Policy):
        size: int = 3

        def plan(self, view, latency):
            return Plan()

    with pytest.raises(
        TypeError, match=r"^Mine\.size must be a setting, such as size: float = setting\("
    ):
        Mine()


def test_a_variant_whose_file_cannot_be_imported_by_its_name_is_named(tmp_path):
    (tmp_path / "my-policy.py").touch()
    with pytest.raises(
        TypeError, match=r"^'my-policy' in /.* cannot be imported: name it 'my_policy'$"
    ):
        variant_names([str(tmp_path)])
    (tmp_path / "my-policy.py").rename(tmp_path / "my_policy.py")
    assert variant_names([str(tmp_path)]) == ("my-policy",)


def test_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path))
    assert home_directory() == tmp_path
    assert home_directory("~/here") == Path.home() / "here"
    monkeypatch.setenv("COSERVE_HOME", "")  # as good as none
    assert home_directory() == Path.home() / ".coserve"


def test_the_home_directory_is_read_from_the_environment_in_one_place():
    readers = [
        path.name
        for path in ROOT.rglob("*.py")
        if re.search(r"environ(\.get\(|\[).COSERVE_HOME", path.read_text())
    ]
    assert readers == ["home.py"]
