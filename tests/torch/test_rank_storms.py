"""Some of the storms on ranks of `make storm`; see `tests/storm/ranks.py`."""

import pytest
from lengths import NUM_RANK_STORMS
from storm.ranks import NUM_ACTIONS, run_rank_storm


def test_a_few_faults_of_one_rank_lose_nothing():
    done, broken = run_rank_storm(1, 30)
    assert broken == []
    assert done["groups that ended"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 2 + NUM_RANK_STORMS))
def test_nothing_is_lost_whatever_one_rank_does(seed: int):
    done, broken = run_rank_storm(seed, NUM_ACTIONS)
    assert broken == []
    assert done["groups that ended"] and done["jobs whose adapter was compared"]
