"""What of a test takes more than a newcomer waits for, and what of its combinations every change
need not wait for."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

# Kills of ranks in each test of them; COSERVE_RANK_KILLS=50 tries more.
NUM_RANK_KILLS = int(os.environ.get("COSERVE_RANK_KILLS", "10"))
# Storms on ranks in their long test; COSERVE_RANK_STORMS=100 tries more.
NUM_RANK_STORMS = int(os.environ.get("COSERVE_RANK_STORMS", "2"))
# Whether tests go through all of their combinations, as `make test-every` has them.
_TRIES_ALL = os.environ.get("COSERVE_EVERY_COMBINATION") == "1"
# Files that take longest, which begin first (the others follow, those with the most tests first):
# processes that share the tests out by files end at about the same time then.
_LONGEST = (
    *(
        "test_storms_simulated",
        "test_cluster_storm",
        "test_rank_storms",
        "test_tensor_parallel_jobs",
    ),
    *("test_engine_storm", "test_client_fields", "test_data_parallel_kinds", "test_data_parallel"),
    *(
        "test_job_crashes",
        "test_demo",
        "test_fine_tuning_crashes",
        "test_group_ends",
        "test_batch_soak",
    ),
    *(
        "test_simulation",
        "test_co_serving",
        "test_recipes",
        "test_compare",
        "test_paper_policies",
        "test_bench",
    ),
    *(
        "test_tiny_model",
        "test_fine_tuning",
        "test_every_family",
        "test_cpu_kernels",
        "test_training",
    ),
    *("test_scheduling", "test_engine_requests"),
)


def place_of(file: Path) -> int:
    """Return the place of a file among those that take longest; the same for all others, after
    them."""
    return _LONGEST.index(file.stem) if file.stem in _LONGEST else len(_LONGEST)


def long_but(*short: Any, of: Iterable[Any]) -> list[Any]:
    """Values of a parameter: `make test` runs those that are short, `make test-long` the others."""
    return [each if each in short else pytest.param(each, marks=pytest.mark.long) for each in of]


def covering(
    cases: Iterable[Case],
    settings_of: Callable[[Case], Sequence[Hashable]],
    *,
    together: int,
    keep: Iterable[Case] = (),
) -> list[Case]:
    """Return some of many cases, in which any values occur that a number of settings can have
    together.

    Most defects are of one setting or of two or three together, so that a part of all combinations
    finds them; `make test-every` tries all.

    Args:
        cases: in an order that decides which of them are taken.
        settings_of: returns the values of a case's settings, as many of each case.
        together: that number of settings.
        keep: cases that are taken in any case.
    """
    found, kept = list(cases), list(keep)
    if _TRIES_ALL:
        return found
    covered = [_tuples(settings_of(each), together) for each in found]
    taken = {place for place, each in enumerate(found) if each in kept}
    left = set[tuple[Any, ...]]().union(*covered).difference(*(covered[place] for place in taken))
    while left:
        best = max(range(len(found)), key=lambda place: len(covered[place] & left))
        taken.add(best)
        left -= covered[best]
    return [found[place] for place in sorted(taken)]


def _tuples(settings: Sequence[Hashable], together: int) -> set[tuple[Any, ...]]:
    """Return the values that this many settings have together, with the places of these."""
    return set(combinations(enumerate(settings), together))
