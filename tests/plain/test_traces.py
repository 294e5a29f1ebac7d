"""Traces: the same from a seed, with the asked rate, bursty; recorded ones by what their files say."""

import gzip
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from coserve.errors import DataError
from coserve.workloads.summary import RequestOutcome, percentile, summarize
from coserve.workloads.traces import Lengths, adapt, bursty, gamma, read_lengths, read_trace

RECORDED = Path(__file__).parents[3] / "shared" / "data"


def variation(trace) -> float:
    gaps = [after.at_s - before.at_s for before, after in pairwise(trace)]
    return pstdev(gaps) / mean(gaps)


@pytest.mark.parametrize("make", [bursty, gamma])
def test_a_trace_is_the_same_from_a_seed_and_has_the_asked_rate(make):
    trace = make(rate=5, seconds=400, seed=3)
    assert trace == make(rate=5, seconds=400, seed=3) != make(rate=5, seconds=400, seed=4)
    assert len(trace) == 2000
    assert all(a.at_s <= b.at_s for a, b in pairwise(trace)) and trace[0].at_s >= 0 and trace[-1].at_s <= 400


def test_arrivals_are_burstier_than_poissons():
    assert variation(bursty(rate=5, seconds=1000, seed=0)) > 1.3
    assert variation(gamma(rate=5, seconds=1000, seed=0, variation=2)) == pytest.approx(2, rel=0.15)
    assert variation(gamma(rate=5, seconds=1000, seed=0, variation=1)) == pytest.approx(1, rel=0.1)
    assert variation(bursty(rate=5, seconds=1000, seed=0, burst_factor=1)) == pytest.approx(1, rel=0.1)


def test_lengths_are_spread_around_their_means():
    lengths = Lengths(mean_prompt_tokens=100, mean_output_tokens=20)
    trace = bursty(rate=10, seconds=500, seed=0, lengths=lengths)
    assert mean(request.num_prompt_tokens for request in trace) == pytest.approx(100, rel=0.05)
    assert mean(request.num_output_tokens for request in trace) == pytest.approx(20, rel=0.05)
    assert all(1 <= request.num_prompt_tokens <= 400 and 1 <= request.num_output_tokens <= 80 for request in trace)


def test_a_trace_of_nothing_is_empty():
    assert bursty(rate=0.1, seconds=1, seed=0) == gamma(rate=0.1, seconds=1, seed=0) == []


def test_recorded_traces_are_read_and_fitted_to_a_machine(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,context_tokens,generated_tokens\n10.5,300,20\n10.0,5,600\n14.0,7,8\n")
    trace = read_trace(path)
    assert [(r.at_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace] == [
        (0, 5, 600),
        (0.5, 300, 20),
        (4, 7, 8),
    ]
    fitted = adapt(trace, rate=2, seconds=0.9, max_prompt_tokens=100, max_output_tokens=50)
    assert [(r.at_s, r.num_prompt_tokens, r.num_output_tokens) for r in fitted] == [(0, 5, 50), (0.125, 100, 20)]
    late = adapt(trace, start_s=0.4)
    assert [r.at_s for r in late] == pytest.approx([0.1, 3.6])
    assert [r.num_output_tokens for r in late] == [20, 8]
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write("slice,timestamp_s,request_tokens,response_tokens\na,5,1,2\nb,6,3,4\nb,8,5,6\n")
    assert [r.at_s for r in read_trace(tmp_path / "t.csv.gz", where={"slice": "b"})] == [0, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column arrival_s or timestamp_s: it has a, b"),
        ("arrival_s,context_tokens,generated_tokens\n1,2,3\n1,x,3\n", "line 3: 1, x, 3 are no seconds"),
        ("arrival_s,context_tokens,generated_tokens\n", "has no requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_trace(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "nothing.csv")


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded traces are not here")
def test_the_traces_that_were_recorded():
    azure = read_trace(RECORDED / "azure_conv.csv.gz")
    assert len(azure) == 19_366 and len(azure) / azure[-1].at_s == pytest.approx(5.53, abs=0.01)
    assert len(read_trace(RECORDED / "burstgpt_slices.csv.gz", where={"slice": "dense"})) == 120
    assert mean(output for _, output in read_lengths(RECORDED / "sharegpt_lengths.csv.gz")) == pytest.approx(439, abs=1)


def test_summaries_count_what_held_and_what_failed():
    outcomes = [
        RequestOutcome(
            index=0, arrival_s=0, end_s=2, ttft_s=0.1, tpot_s=0.01, gaps_s=(0.01, 0.02), num_output_tokens=3
        ),
        RequestOutcome(index=1, arrival_s=0, end_s=2, ttft_s=0.3, tpot_s=0.01, num_output_tokens=2),
        RequestOutcome(index=2, arrival_s=1, end_s=4, ttft_s=0.1, num_output_tokens=1),
        RequestOutcome(index=3, arrival_s=1, end_s=2, error="it broke"),
    ]
    summary = summarize(outcomes, ttft_s=0.2, tpot_s=0.05)
    assert (summary["requests"], summary["failed"], summary["attainment"]) == (4, 1, 0.5)
    assert summary["ttft_ms"] == {"p50": 100, "p99": 300} and summary["gap_ms"] == {"p50": 20, "p99": 20}
    assert summary["output_tokens_per_s"] == 1.5
    nothing = summarize([], ttft_s=1, tpot_s=1)
    assert nothing["attainment"] is None and nothing["tpot_ms"] == {"p50": None, "p99": None}
    assert percentile([3, 1, 2], 0.5) == 2
