"""Traces: the same from a seed, with the asked rate, bursty; recorded ones by what their files
say."""

import gzip
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from coserve.errors import DataError
from coserve.workloads.arrivals import (
    LogNormalLengths,
    RecordedLengths,
    bursty,
    daily,
    gamma,
    poisson,
)
from coserve.workloads.summary import RequestOutcome, percentile, summarize
from coserve.workloads.traces import (
    TracedRequest,
    adapt,
    read_day,
    read_lengths,
    read_trace,
    rescale,
    scale_lengths,
)

RECORDED = Path(__file__).parents[3] / "shared" / "data"


def variation(trace) -> float:
    gaps = [after.at_s - before.at_s for before, after in pairwise(trace)]
    return pstdev(gaps) / mean(gaps)


@pytest.mark.parametrize("make", [bursty, gamma, poisson])
def test_a_trace_is_the_same_from_a_seed_and_has_the_asked_rate(make):
    trace = make(rate=5, seconds=400, seed=3)
    assert trace == make(rate=5, seconds=400, seed=3) != make(rate=5, seconds=400, seed=4)
    assert len(trace) == 2000
    assert (
        all(a.at_s <= b.at_s for a, b in pairwise(trace))
        and trace[0].at_s >= 0
        and trace[-1].at_s <= 400
    )


def test_arrivals_are_burstier_than_poissons():
    assert variation(bursty(rate=5, seconds=1000, seed=0)) > 1.3
    assert variation(gamma(rate=5, seconds=1000, seed=0, variation=2)) == pytest.approx(2, rel=0.15)
    assert variation(gamma(rate=5, seconds=1000, seed=0, variation=1)) == pytest.approx(1, rel=0.1)
    assert variation(bursty(rate=5, seconds=1000, seed=0, burst_factor=1)) == pytest.approx(
        1, rel=0.1
    )
    assert variation(poisson(rate=5, seconds=1000, seed=0)) == pytest.approx(1, rel=0.1)


def test_lengths_are_spread_around_their_means():
    lengths = LogNormalLengths(mean_prompt_tokens=100, mean_output_tokens=20)
    trace = bursty(rate=10, seconds=500, seed=0, lengths=lengths)
    assert mean(request.num_prompt_tokens for request in trace) == pytest.approx(100, rel=0.05)
    assert mean(request.num_output_tokens for request in trace) == pytest.approx(20, rel=0.05)
    assert all(
        1 <= request.num_prompt_tokens <= 400 and 1 <= request.num_output_tokens <= 80
        for request in trace
    )


def test_a_trace_of_nothing_is_empty():
    assert bursty(rate=0.1, seconds=1, seed=0) == gamma(rate=0.1, seconds=1, seed=0) == []


def test_recorded_traces_are_read_and_fitted_to_a_machine(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,context_tokens,generated_tokens\n10.5,300,20\n10.0,5,600\n14.0,7,8\n"
    )
    trace = read_trace(path)
    assert [(r.at_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace] == [
        (0, 5, 600),
        (0.5, 300, 20),
        (4, 7, 8),
    ]
    fitted = adapt(trace, rate=2, seconds=0.9, max_prompt_tokens=100, max_output_tokens=50)
    assert [(r.at_s, r.num_prompt_tokens, r.num_output_tokens) for r in fitted] == [
        (0, 5, 50),
        (0.125, 100, 20),
    ]
    late = adapt(trace, start_s=0.4)
    assert [r.at_s for r in late] == pytest.approx([0.1, 3.6])
    assert [r.num_output_tokens for r in late] == [20, 8]
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        file.write("slice,timestamp_s,request_tokens,response_tokens\na,5,1,2\nb,6,3,4\nb,8,5,6\n")
    assert [r.at_s for r in read_trace(tmp_path / "t.csv.gz", where={"slice": "b"})] == [0, 2]


def test_requests_that_all_come_at_once_do_so_at_any_rate():
    trace = [
        TracedRequest(at_s=0, num_prompt_tokens=5, num_output_tokens=index) for index in (1, 2)
    ]
    assert adapt(trace, rate=2, seconds=1) == trace
    assert adapt([], rate=2) == []


def test_slices_of_a_trace_are_no_trace(tmp_path):
    """Between them lie days that nobody recorded."""
    path = tmp_path / "slices.csv"
    path.write_text(
        "slice,timestamp_s,request_tokens,response_tokens\na,5,1,2\nb,2246400,3,4\nb,2246402,5,6\n"
    )
    with pytest.raises(
        DataError,
        match=r"has 2 slices of a longer trace \(a, b\): choose one, with --where slice=a",
    ):
        read_trace(path)
    assert len(read_trace(path, where={"slice": "b"})) == 2
    with pytest.raises(DataError, match="has no requests with slice=c"):
        read_trace(path, where={"slice": "c"})
    with pytest.raises(DataError, match=r"no column part: it has slice, timestamp_s"):
        read_trace(path, where={"part": "c"})
    path.write_text(",timestamp_s,request_tokens,response_tokens\n0,5,1,2\n1,6,3,4\n")
    assert len(read_trace(path)) == 2, "rows that are numbered are no slices"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b\n1,2\n",
            "no column arrival_s or timestamp_s or timestamp or arrived_at: it has a, b",
        ),
        (
            "arrival_s,context_tokens,generated_tokens\n1,2,3\n1,x,3\n",
            "line 3: 1, x, 3 are no seconds",
        ),
        ("arrival_s,context_tokens,generated_tokens\n1,2\n", "line 2: 1, 2,  are no seconds"),
        (
            "arrival_s,context_tokens,generated_tokens\n1,2,3,4\n",
            "line 2: has more fields than the header",
        ),
        (
            "arrival_s,context_tokens,generated_tokens\nnan,2,3\n",
            "line 2: nan, 2, 3 are no seconds",
        ),
        ("arrival_s,context_tokens,generated_tokens\n1,-2,3\n", "line 2: 1, -2, 3 are no seconds"),
        (
            '{"arrival_s": 1, "context_tokens": 2, "generated_tokens": 3}\n{"arrival_s"\n',
            "line 2: is not valid JSON",
        ),
        (
            '{"arrival_s": 1, "context_tokens": 2, "generated_tokens": 3}\n[1]\n',
            "line 2: must be a JSON object",
        ),
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


def test_traces_are_read_as_they_are_published(tmp_path):
    expected = [(0, 374, 44), (pytest.approx(4.314579), 396, 109)]

    def read(text: str, *, zipped: bool = False):
        path = tmp_path / "trace"  # whatever its name
        path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        return [(r.at_s, r.num_prompt_tokens, r.num_output_tokens) for r in read_trace(path)]

    azure = (
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    )
    azure += "2023-11-16 18:15:50.9951690,396,109\r\n"
    assert read(azure) == read(azure, zipped=True) == expected
    zoned = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,2\n2024-05-10 02:00:01+02:00,3,4\n"
    assert read(zoned) == [(0, 1, 2), (0.5, 3, 4)]
    burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    burst += "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,9,0,9,API log\n45,ChatGPT,1087,230,1317,API log\n"
    assert read(burst) == [(0, 472, 18), (40, 1087, 230)], "what failed there is left out"
    lines = '{"timestamp_s": 3, "prompt_tokens": 1, "output_tokens": 2}\n\n'
    lines += '{"timestamp_s": 4.5, "prompt_tokens": 3, "output_tokens": 4}\n'
    assert read(lines) == [(0, 1, 2), (1.5, 3, 4)]
    simulators = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,74,918\n1.5,290,905\n"
    assert read(simulators) == [(0, 74, 918), (1, 290, 905)], "Sarathi-Serve's and Vidur's"
    path = tmp_path / "lengths.csv"
    path.write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"
    )
    assert read_lengths(path) == [(74, 918)]


def test_a_mean_rate_keeps_the_shape_of_bursts():
    trace = bursty(rate=5, seconds=400, seed=1)
    slow, fast = rescale(trace, rate=0.5, seconds=1000), rescale(trace, rate=50, seconds=10)
    assert len(slow) == len(fast) == 500
    assert [r.at_s * 100 for r in fast] == pytest.approx([r.at_s for r in slow])
    assert variation(slow) == pytest.approx(variation(trace[:500]))
    assert slow[0].at_s == 0 and 900 < slow[-1].at_s <= 1000
    whole = rescale(trace, rate=10, seconds=200)
    assert len(whole) == len(trace) and 0 < whole[-1].at_s < 200
    assert (
        rescale(trace, rate=1, seconds=10, skip=7)[0].num_prompt_tokens
        == trace[7].num_prompt_tokens
    )
    assert rescale(trace[:1], rate=1, seconds=1)[0].at_s == 0
    again = rescale(trace, rate=10, seconds=400)
    assert len(again) == 2 * len(trace), "it is played again"
    assert (
        again[2000].at_s == pytest.approx(200)
        and again[2000].num_prompt_tokens == trace[0].num_prompt_tokens
    )
    assert [r.num_prompt_tokens for r in scale_lengths(slow[:2], 0.001)] == [1, 1]


def test_a_day_follows_its_hours(tmp_path):
    path = tmp_path / "day.csv"
    path.write_text(
        "hour_of_day,sessions,requests\n"
        + "".join(f"{h},1,{3 if h == 13 else 1}\n" for h in range(24))
    )
    day = daily(read_day(path), rate=10, hour_s=26.0, seed=0, lengths=RecordedLengths([(7, 8)]))
    assert len(day) == 10 * 26 * 24
    per_hour = [sum(int(r.at_s // 26) == hour for r in day) for hour in range(24)]
    assert per_hour[13] == pytest.approx(3 * mean(per_hour[:13]), rel=0.15)
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in day} == {(7, 8)}
    path.write_text("hour_of_day,requests\n0,1\n")
    with pytest.raises(DataError, match=r"requests of each hour from 0 to 23, not \[0\]"):
        read_day(path)


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded traces are not here")
def test_the_traces_that_were_recorded():
    azure = read_trace(RECORDED / "azure_conv.csv.gz")
    assert len(azure) == 19_366 and len(azure) / azure[-1].at_s == pytest.approx(5.53, abs=0.01)
    assert len(read_trace(RECORDED / "burstgpt_slices.csv.gz", where={"slice": "dense"})) == 120
    assert mean(
        output for _, output in read_lengths(RECORDED / "sharegpt_lengths.csv.gz")
    ) == pytest.approx(439, abs=1)
    assert sum(read_day(RECORDED / "burstgpt_hourly.csv.gz")) == 1_429_737


def test_summaries_count_what_held_and_what_failed():
    outcomes = [
        RequestOutcome(
            index=0,
            arrival_s=0,
            end_s=2,
            ttft_s=0.1,
            tpot_s=0.01,
            gaps_s=(0.01, 0.02),
            num_output_tokens=3,
        ),
        RequestOutcome(index=1, arrival_s=0, end_s=2, ttft_s=0.3, tpot_s=0.01, num_output_tokens=2),
        RequestOutcome(index=2, arrival_s=1, end_s=4, ttft_s=0.1, num_output_tokens=1),
        RequestOutcome(index=3, arrival_s=1, end_s=2, error="it broke"),
    ]
    summary = summarize(outcomes, ttft_s=0.2, tpot_s=0.05)
    assert (summary["requests"], summary["failed"], summary["attainment"]) == (4, 1, 0.5)
    assert summary["ttft_ms"] == {"p50": 100, "p99": 300} and summary["gap_ms"] == {
        "p50": 20,
        "p99": 20,
    }
    assert summary["output_tokens_per_s"] == 1.5
    assert summary["goodput_per_s"] == 0.5, "two of them held both within four seconds"
    assert summarize([], ttft_s=1, tpot_s=1)["goodput_per_s"] is None
    nothing = summarize([], ttft_s=1, tpot_s=1)
    assert nothing["attainment"] is None and nothing["tpot_ms"] == {"p50": None, "p99": None}
    assert percentile([3, 1, 2], 0.5) == 2
