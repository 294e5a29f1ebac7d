"""Measurement of servers over HTTP: coserve and another with OpenAI's routes, by the same client,
in turns.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from coserve.client.http import Client
from coserve.errors import CoserveError
from coserve.workloads.load import Body, closed_loop, completions
from coserve.workloads.summary import RequestOutcome, percentile
from coserve.workloads.traces import TracedRequest

_CONCURRENT = (1, 4, 8)
_PROMPT_TOKENS, _OUTPUT_TOKENS = 512, 64
# Requests per turn, for each that runs at once.
_ROUNDS = 2
# Seconds before a server's turn: vLLM's threads keep a core busy for up to two seconds after an
# answer, in which the next server's first prompt took 1.8 s for 1.0.
_SETTLE_S = 4.0
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def run(
    servers: Mapping[str, str],
    *,
    vocab_size: int,
    runs: int,
    api_key: str | None = None,
    concurrent: Sequence[int] = _CONCURRENT,
    prompt_tokens: int = _PROMPT_TOKENS,
    output_tokens: int = _OUTPUT_TOKENS,
    watch: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """Measure closed loops of 1, 4 and 8 requests against each server, in turns.

    Prompts are random, new in each turn and the same for all servers; answers have the likeliest
    tokens and end at their length. Tokens per second are medians over the turns, after one that
    warms up; percentiles are over the requests of all turns.

    Args:
        servers: URLs by name.
        vocab_size: Number of tokens to choose prompts from.
        runs: Number of turns.
        api_key: API key of the servers.
        concurrent: Numbers of requests at once.
        prompt_tokens: Tokens per prompt.
        output_tokens: Tokens per answer.
        watch: Function that is called with what is being done.

    Raises:
        CoserveError: A request failed.
    """
    models = {name: _model(url, api_key) for name, url in servers.items()}
    rows = []
    for number in concurrent:
        speeds: dict[str, list[float]] = {name: [] for name in servers}
        outcomes: dict[str, list[RequestOutcome]] = {name: [] for name in servers}
        for turn in range(runs + 1):
            for name, url in servers.items():
                watch(f"{name}: {number} at once, turn {turn} of {runs}")
                time.sleep(_SETTLE_S if len(servers) > 1 else 0)
                body = _greedy(
                    completions(models[name], vocab_size=vocab_size, seed=1000 * number + turn)
                )
                requests = [
                    TracedRequest(
                        at_s=0.0, num_prompt_tokens=prompt_tokens, num_output_tokens=output_tokens
                    )
                ] * (number * (_ROUNDS if turn else 1))
                answered = asyncio.run(
                    closed_loop(url, requests, body, concurrent=number, api_key=api_key)
                )
                _check(name, answered)
                if turn:
                    speeds[name].append(_tokens_per_s(answered))
                    outcomes[name] += answered
        rows += [
            {
                "server": name,
                "concurrent": number,
                "output_tokens_per_s": median(speeds[name]),
                **_percentiles("ttft", [outcome.ttft_s for outcome in outcomes[name]]),
                **_percentiles("tpot", [outcome.tpot_s for outcome in outcomes[name]]),
            }
            for name in servers
        ]
    return {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "rows": rows}


def _model(url: str, api_key: str | None) -> str:
    """Return the server's base model."""
    with Client(url, api_key) as client:
        models = client.get("/v1/models")["data"]
    return str(next(model["id"] for model in models if not model.get("parent")))


def _greedy(body: Body) -> Body:
    return lambda index, request: {**body(index, request), "temperature": 0}


def _check(name: str, outcomes: Sequence[RequestOutcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise CoserveError(f"a request to {name} failed: {outcome.error}")
        if outcome.tpot_s is None:
            raise CoserveError(
                f"an answer of {name} arrived in one piece: the model needs a tokenizer, so that "
                f"tokens are sent as text"
            )


def _tokens_per_s(outcomes: Sequence[RequestOutcome]) -> float:
    return sum(outcome.num_output_tokens for outcome in outcomes) / max(
        outcome.end_s for outcome in outcomes
    )


def _percentiles(name: str, values_s: Sequence[float | None]) -> dict[str, float]:
    known = [value for value in values_s if value is not None]
    return {
        f"{name}_{words}_ms": 1e3 * percentile(known, share) for words, share in _SHARES.items()
    }
