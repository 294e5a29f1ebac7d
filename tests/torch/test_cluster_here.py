"""A cluster for real and in virtual time: the same requests, on both sides to their ends."""

from itertools import pairwise
from math import log
from statistics import pstdev

import pytest

from coserve.cluster.view import ClusterTask
from coserve.models.backbone import load_backbone
from coserve.protocol.messages import Ready, StepRecord
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from experiments.cluster import here as cluster_here


def test_lone_requests_are_far_apart_and_the_seed_decides():
    config = cluster_here.HereConfig(num_requests=20, seed=3)
    alone = cluster_here.make_tasks(config, alone=True)
    assert all(b.arrival_s - a.arrival_s >= 1.0 for a, b in pairwise(alone))
    tasks = cluster_here.make_tasks(config)
    assert len(tasks) == 20 and tasks == cluster_here.make_tasks(config)
    assert tasks != cluster_here.make_tasks(cluster_here.HereConfig(num_requests=20, seed=4))


def test_a_profile_is_fitted_to_steps_by_their_rows():
    """Decoding takes 0.7 times what the profile says, and prompts 1.3 times, or half or twice that
    by chance."""
    backbone = load_backbone("tiny", dtype="float32", device="meta")
    profile = roofline_profile(
        backbone, Hardware(name="cpu", flops_per_s=6e9, bytes_per_s=1e10, call_s=1e-5)
    )

    def load(decode: int, prompt: int) -> ForwardLoad:
        spans = decode + (prompt > 0)
        return ForwardLoad(rows=decode + prompt, sampled=spans, spans=spans, keys=88 * spans)

    def steps(decode: int, prompt: int, times: tuple[float, ...]) -> list[StepRecord]:
        said_s = LatencyModel(profile).forward_s(load(decode, prompt))
        return [StepRecord(1.0, each * said_s, said_s, decode, prompt, 0, 0.0) for each in times]

    spread = (0.65, 2.6, 0.65, 1.3, 1.3) * 4
    made = [
        *steps(1, 0, (0.7,) * 300),
        *steps(3, 0, (0.7,) * 200),
        *steps(2, 60, spread),
        *steps(2, 200, spread),
    ]
    fitted = cluster_here._fit(profile, made)
    for decode, prompt in ((1, 0), (3, 0), (2, 60), (2, 200)):
        took_s = [
            each.step_s
            for each in made
            if (each.decode_rows, each.prefill_rows) == (decode, prompt)
        ]
        said_s = LatencyModel(fitted.profile).forward_s(load(decode, prompt))
        assert said_s == pytest.approx(sum(took_s) / len(took_s), rel=0.05)
    assert 0.7 < fitted.times < 1.3
    assert fitted.noise == pytest.approx(pstdev([log(each) for each in spread]), rel=0.1), (
        "that of prompts alone"
    )


def test_runs_of_a_side_are_taken_together_and_beside_each_other():
    def run(*firsts_s: float) -> list[cluster_here._Answer]:
        return [
            cluster_here._Answer(float(at_s), first_s, 2 * first_s)
            for at_s, first_s in enumerate(firsts_s)
        ]

    found = cluster_here._compared(
        real=[run(0.1, 0.2, 0.3), run(0.1, 0.2, 0.6)],
        modelled=[run(0.2, 0.2, 0.3)] * 2,
        num_tokens=30,
    )
    assert [row["ttft_p99_ms"] for row in found["rows"]] == [600, 300]
    assert found["error"]["ttft_p99_ms"] == -0.5
    assert found["median_error"]["ttft_p99_ms"] == pytest.approx(300 / 450 - 1, abs=1e-3)
    assert found["spread"] == {
        "real": found["spread"]["real"],
        "modelled": dict.fromkeys(found["error"], 0.0),
    }
    assert (
        found["spread"]["real"]["ttft_p99_ms"] == 1.0
        and found["spread"]["real"]["ttft_p50_ms"] == 0.0
    )
    assert found["rows"][0]["tokens_per_s"] == pytest.approx(60 / (2.6 + 3.2), rel=1e-3)


def test_modelled_nodes_have_noise_of_their_own_and_the_seed_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path))
    backbone = load_backbone("tiny", dtype="float32", device="meta")
    hardware = Hardware(name="cpu", flops_per_s=6e9, bytes_per_s=1e10, call_s=1e-5)
    profile = roofline_profile(backbone, hardware)
    ready = Ready(
        model="tiny",
        dtype="float32",
        device="cpu",
        threads=1,
        slo=Slo(ttft_s=2.0, tpot_s=0.1),
        vocab_size=backbone.architecture.vocab_size,
        max_positions=512,
        num_pages=1000,
        page_bytes=1024,
        block_tokens=16,
        weight_bytes=10**6,
        hardware="cpu",
        profile=profile,
    )
    config = cluster_here.HereConfig(num_nodes=2, num_requests=0)
    fitted = cluster_here._Fitted(profile, 1.0, 0.3)
    modelled = cluster_here._Modelled(backbone, ready, fitted, 0.0, 0.005, config)
    tasks = [
        ClusterTask(id=id, kind="request", arrival_s=1.0, num_tokens=50, num_output_tokens=5)
        for id in ("a", "b")
    ]
    first, second = modelled.play(tasks, 0)
    assert first.first_s != second.first_s, "the same request on two nodes"
    assert min(first.first_s, second.first_s) > 0.005
    assert modelled.play(tasks, 0) == [first, second] != modelled.play(tasks, 1)


@pytest.mark.long
def test_real_nodes_and_modelled_ones_answer_the_same_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("COSERVE_HOME", str(tmp_path))
    config = cluster_here.HereConfig(num_nodes=2, num_requests=12, num_runs=2, rate=6.0)
    found = cluster_here.run(load_backbone("tiny", dtype="float32", device="meta"), config)
    assert [row["nodes"] for row in found["rows"]] == ["real", "modelled"]
    for row in found["rows"]:
        assert row["requests_per_s"] > 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["latency_p99_ms"]
    assert set(found["error"]) == set(found["rows"][0]) - {"nodes"}
    assert found["profile_times"] > 0
    assert {name: len(runs) for name, runs in found["runs"].items()} == {
        "real": 2,
        "modelled": config.num_seeds,
    }
