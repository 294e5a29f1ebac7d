"""The load generator against a real server: what it writes down is what was sent and answered."""

import asyncio

from served import tokenizer

from coserve.workloads.arrivals import LogNormalLengths, bursty
from coserve.workloads.load import LoadGenerator, chats, closed_loop, completions
from coserve.workloads.summary import summarize
from coserve.workloads.traces import TracedRequest


def play(served, trace, body):
    load = LoadGenerator(served.url, trace, body)
    outcomes = asyncio.run(load.run())
    assert load.num_open == 0 and [outcome.index for outcome in outcomes] == list(range(len(trace)))
    return outcomes


def test_every_request_is_answered_with_the_traces_lengths(served):
    trace = bursty(
        rate=10,
        seconds=3,
        seed=1,
        lengths=LogNormalLengths(mean_prompt_tokens=20, mean_output_tokens=8),
    )
    outcomes = play(served, trace, completions("small", vocab_size=len(tokenizer())))
    for outcome, request in zip(outcomes, trace, strict=True):
        assert (
            outcome.error is None
            and outcome.finish_reason == "length"
            and outcome.arrival_s == request.at_s
        )
        assert outcome.num_prompt_tokens == request.num_prompt_tokens
        assert outcome.num_output_tokens == request.num_output_tokens
        assert (
            0 < outcome.ttft_s <= outcome.end_s - outcome.arrival_s and outcome.end_s > request.at_s
        )
        assert all(gap >= 0 for gap in outcome.gaps_s) and len(outcome.gaps_s) < max(
            1, request.num_output_tokens
        )
    summary = summarize(outcomes, ttft_s=60, tpot_s=60)
    assert (summary["requests"], summary["failed"], summary["attainment"]) == (30, 0, 1.0)
    assert summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"]


def test_arrivals_do_not_wait_for_answers(served):
    requests = [(0.0, 400), (0.01, 2)]
    trace = [
        TracedRequest(at_s=at_s, num_prompt_tokens=4, num_output_tokens=length)
        for at_s, length in requests
    ]
    load = LoadGenerator(served.url, trace, chats("small", ["Hello?", "Who are you?"]))

    async def watched() -> int:
        playing = asyncio.create_task(load.run())
        while load.num_sent < 2:
            await asyncio.sleep(0.001)
        num_open = load.num_open
        await playing
        return num_open

    assert asyncio.run(watched()) == 2, "the first takes 400 steps"
    assert sorted(outcome.num_output_tokens for outcome in load.outcomes) == [2, 400]


def test_what_fails_is_an_outcome_with_the_servers_words(served):
    trace = [TracedRequest(at_s=0.0, num_prompt_tokens=4, num_output_tokens=2)]
    (outcome,) = play(served, trace, completions("nobody", vocab_size=9))
    assert (
        "nobody" in outcome.error
        and outcome.ttft_s is None
        and not outcome.attained(ttft_s=9, tpot_s=9)
    )


def test_a_server_that_is_not_there_fails_every_request():
    trace = bursty(rate=20, seconds=0.2, seed=0)
    load = LoadGenerator("http://127.0.0.1:9", trace, completions("small", vocab_size=9))
    assert all(outcome.error for outcome in asyncio.run(load.run())) and len(load.outcomes) == 4


def test_a_closed_loop_has_as_many_under_way_as_are_asked_for(served):
    requests = [TracedRequest(at_s=0.0, num_prompt_tokens=4, num_output_tokens=8)] * 7
    body = completions("small", vocab_size=len(tokenizer()))
    outcomes = asyncio.run(closed_loop(served.url, requests, body, concurrent=3))
    assert sorted(outcome.index for outcome in outcomes) == list(range(7))
    assert all(outcome.error is None and outcome.num_output_tokens == 8 for outcome in outcomes)
    for outcome in outcomes:
        others = [other for other in outcomes if other.arrival_s <= outcome.arrival_s < other.end_s]
        assert len(others) <= 3, "it and two more"
    assert max(outcome.ttft_s for outcome in outcomes) < max(outcome.end_s for outcome in outcomes)
