"""Load generators: they send requests to a server over HTTP, and record what each of them saw.

Open loop (`LoadGenerator`): a request is sent at its time in the trace, however those before it
ended; so a slow server meets a queue, as it would outside. Closed loop (`closed_loop`): always as
many are under way as are asked for.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import httpx

from coserve.client.http import auth_headers, base_url, chunk_of, refusal
from coserve.errors import ServerError
from coserve.workloads.summary import RequestOutcome
from coserve.workloads.traces import TracedRequest

# A request's body, from its number and what the trace has of it; with "messages" it is a chat.
Body = Callable[[int, TracedRequest], dict[str, Any]]

# A guard: no answer, and no next piece of one, for this long is a failure.
_TIMEOUT_S = 120.0


class LoadGenerator:
    """A trace on its way through a server. `outcomes` and the counts may be read from another
    thread meanwhile.
    """

    def __init__(
        self, url: str, trace: Sequence[TracedRequest], body: Body, *, api_key: str | None = None
    ) -> None:
        self.outcomes: list[RequestOutcome] = []
        self.num_sent = 0
        self.start_s: float | None = None
        self._url, self._headers = base_url(url), auth_headers(api_key)
        self._trace, self._body = trace, body

    @property
    def num_open(self) -> int:
        return self.num_sent - len(self.outcomes)

    async def run(self) -> list[RequestOutcome]:
        """Play the trace to its end, and wait for all answers. Returns the outcomes in the order of
        arrival.
        """
        async with _http(self._url, self._headers) as http:
            self.start_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for index, request in enumerate(self._trace):
                    await asyncio.sleep(self.start_s + request.at_s - time.monotonic())
                    self.num_sent += 1
                    tasks.create_task(self._ask(http, index, request, self.start_s))
        return sorted(self.outcomes, key=lambda outcome: outcome.index)

    async def _ask(
        self, http: httpx.AsyncClient, index: int, request: TracedRequest, start_s: float
    ) -> None:
        self.outcomes.append(
            await _ask(http, self._body(index, request), index, request.at_s, start_s)
        )


async def closed_loop(
    url: str,
    requests: Sequence[TracedRequest],
    body: Body,
    *,
    concurrent: int,
    api_key: str | None = None,
) -> list[RequestOutcome]:
    """Send requests in their order, whatever their times, each as soon as fewer than `concurrent`
    are under way. Returns the outcomes in the order in which they ended.
    """
    outcomes: list[RequestOutcome] = []
    waiting = iter(enumerate(requests))
    start_s = time.monotonic()
    async with _http(base_url(url), auth_headers(api_key)) as http:

        async def stream() -> None:
            for index, request in waiting:
                arrival_s = time.monotonic() - start_s
                outcomes.append(await _ask(http, body(index, request), index, arrival_s, start_s))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrent):
                tasks.create_task(stream())
    return outcomes


def _http(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, limits=limits)


async def _ask(
    http: httpx.AsyncClient, body: dict[str, Any], index: int, arrival_s: float, start_s: float
) -> RequestOutcome:
    """Send one request and wait for its end; its times are from start_s on."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer, error = _Answer(), None
    try:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with http.stream("POST", path, json=body) as response:
            if response.is_error:
                raise refusal(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                answer.take(line, time.monotonic() - start_s)
        if answer.finish_reason is None:
            error = "the stream ended before the answer did"
    except (ServerError, httpx.HTTPError) as failure:
        error = " ".join(str(failure).split()) or type(failure).__name__
    return answer.outcome(index, arrival_s, time.monotonic() - start_s, error)


class _Answer:
    """The part of a streamed answer that has arrived."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._times_s: list[float] = []  # of the pieces with text
        self._usage: dict[str, Any] = {}

    def take(self, line: str, now_s: float) -> None:
        chunk = chunk_of(line)
        if chunk is None:
            return
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                self._times_s.append(now_s)

    def outcome(
        self, index: int, arrival_s: float, end_s: float, error: str | None
    ) -> RequestOutcome:
        times_s, num_tokens = self._times_s, int(self._usage.get("completion_tokens") or 0)
        ttft_s = tpot_s = None
        if error is None:  # an answer without any text has come when it ended
            ttft_s = (times_s[0] if times_s else end_s) - arrival_s
            tpot_s = (
                (times_s[-1] - times_s[0]) / (num_tokens - 1)
                if num_tokens > 1 and len(times_s) > 1
                else None
            )
        details = self._usage.get("prompt_tokens_details") or {}
        return RequestOutcome(
            index=index,
            arrival_s=arrival_s,
            end_s=end_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            gaps_s=tuple(after - before for before, after in pairwise(times_s)),
            num_prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            num_output_tokens=num_tokens,
            num_cached_tokens=int(details.get("cached_tokens") or 0),
            finish_reason=self.finish_reason,
            error=error,
        )


def completions(model: str, *, vocab_size: int, seed: int = 0) -> Body:
    """Return bodies with prompts of random tokens, of the trace's lengths, whose answers end at the
    trace's lengths and not before.
    """

    def body(index: int, request: TracedRequest) -> dict[str, Any]:
        tokens = Random(f"{seed}/{index}").choices(range(vocab_size), k=request.num_prompt_tokens)
        return {
            "model": model,
            "prompt": tokens,
            "max_tokens": request.num_output_tokens,
            "ignore_eos": True,
        }

    return body


def chats(model: str, questions: Sequence[str]) -> Body:
    """Return bodies with questions in turn, whose answers end at the trace's lengths and not
    before.
    """

    def body(index: int, request: TracedRequest) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": questions[index % len(questions)]}],
            "max_tokens": request.num_output_tokens,
            "ignore_eos": True,
            "seed": index,
        }

    return body
