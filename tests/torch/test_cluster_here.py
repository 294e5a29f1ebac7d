"""A cluster for real and in virtual time: the same requests, on both sides to their ends."""

from itertools import pairwise
from math import log
from statistics import pstdev

import pytest

from coserve.bench import cluster_here
from coserve.models.backbone import load_backbone
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.worker.protocol import StepRecord


def test_lone_requests_are_far_apart_and_the_seed_decides():
    config = cluster_here.HereConfig(num_requests=20, seed=3)
    alone = cluster_here.make_tasks(config, alone=True)
    assert all(b.arrival_s - a.arrival_s >= 1.0 for a, b in pairwise(alone))
    tasks = cluster_here.make_tasks(config)
    assert len(tasks) == 20 and tasks == cluster_here.make_tasks(config)
    assert tasks != cluster_here.make_tasks(cluster_here.HereConfig(num_requests=20, seed=4))


def test_a_profile_is_fitted_to_steps_by_their_rows():
    """Decoding takes 0.7 times what the profile says, and prompts 1.3 times, or half or twice that by chance."""
    backbone = load_backbone("tiny", dtype="float32", device="meta")
    profile = roofline_profile(backbone, Hardware(name="cpu", flops_per_s=6e9, bytes_per_s=1e10, call_s=1e-5))

    def load(decode: int, prompt: int) -> ForwardLoad:
        spans = decode + (prompt > 0)
        return ForwardLoad(rows=decode + prompt, sampled=spans, spans=spans, keys=88 * spans)

    def steps(decode: int, prompt: int, times: tuple[float, ...]) -> list[StepRecord]:
        said_s = LatencyModel(profile).forward_s(load(decode, prompt))
        return [StepRecord(1.0, each * said_s, said_s, decode, prompt, 0, 0.0) for each in times]

    spread = (0.65, 2.6, 0.65, 1.3, 1.3) * 4
    made = [*steps(1, 0, (0.7,) * 300), *steps(3, 0, (0.7,) * 200), *steps(2, 60, spread), *steps(2, 200, spread)]
    fitted = cluster_here._fit(profile, made)
    for decode, prompt in ((1, 0), (3, 0), (2, 60), (2, 200)):
        took_s = [each.step_s for each in made if (each.decode_rows, each.prefill_rows) == (decode, prompt)]
        said_s = LatencyModel(fitted.profile).forward_s(load(decode, prompt))
        assert said_s == pytest.approx(sum(took_s) / len(took_s), rel=0.05)
    assert 0.7 < fitted.times < 1.3
    assert fitted.noise == pytest.approx(pstdev([log(each) for each in spread]), rel=0.1), "that of prompts alone"


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
