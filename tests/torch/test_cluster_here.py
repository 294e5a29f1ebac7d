"""A cluster for real and in virtual time: the same requests, on both sides to their ends."""

from itertools import pairwise

import pytest

from coserve.bench import cluster_here
from coserve.models.backbone import load_backbone


def test_lone_requests_are_far_apart_and_the_seed_decides():
    config = cluster_here.HereConfig(num_requests=20, seed=3)
    alone = cluster_here.make_tasks(config, alone=True)
    assert all(b.arrival_s - a.arrival_s >= 1.0 for a, b in pairwise(alone))
    tasks = cluster_here.make_tasks(config)
    assert len(tasks) == 20 and tasks == cluster_here.make_tasks(config)
    assert tasks != cluster_here.make_tasks(cluster_here.HereConfig(num_requests=20, seed=4))


@pytest.mark.long
def test_real_nodes_and_modelled_ones_answer_the_same_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path))
    config = cluster_here.HereConfig(num_nodes=2, num_requests=12, rate=6.0)
    found = cluster_here.run(load_backbone("tiny", dtype="float32", device="meta"), config)
    assert [row["nodes"] for row in found["rows"]] == ["real", "modelled"]
    for row in found["rows"]:
        assert row["requests_per_s"] > 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["latency_p99_ms"]
    assert set(found["error"]) == set(found["rows"][0]) - {"nodes"}
    assert found["profile_times"] > 0
