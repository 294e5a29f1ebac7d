"""Some of the storms on a cluster of `make storm`; see `tests/storm/clustered.py`."""

import pytest
from storm.clustered import KINDS, run_cluster_storm

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", [0, 1])
def test_no_promise_is_broken(seed: int):
    done, broken = run_cluster_storm(seed)
    assert broken == []
    assert sum(number for what, number in done.items() if what.partition(":")[0] in KINDS) >= 3
    assert done["requests: answered by the base"] and done["die"] and done["drain"]
