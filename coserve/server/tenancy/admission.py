"""Limits of tenants on requests and tokens, as OpenAI has them: 429 with the time after which to
retry.

Tokens are counted in a bucket that fills at the tenant's rate, up to one minute's worth. A prompt
is charged when its request is sent to the engine, each generated token when it arrives. The length
of an answer is not known in advance, so a bucket may fall below zero, and the next request waits
until it has filled again. In the long run the rate holds exactly.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coserve.errors import LimitError
from coserve.protocol.messages import Ready, StepReport
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.ledger import RequestLedger

# When a request under way ends is not known; this soon it can be asked again.
_RETRY_S = 1.0


@dataclass
class _Bucket:
    """Token bucket of a tenant."""

    level: float
    """Tokens that may be used at `time_s`; negative after a long answer."""
    time_s: float
    """Time of `level`."""


class Admission:
    """Counter of open sequences and used tokens per tenant.

    It is an `EngineListener`, to count generated tokens, and belongs to the event loop.
    """

    def __init__(
        self, keys: Keys, ledger: RequestLedger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys, self._ledger, self._clock = keys, ledger, clock
        self._num_open: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    def begin(self, tenant: str, *, num_sequences: int, num_prompt_tokens: int) -> None:
        """Count sequences that are about to be sent to the engine; `end` must follow.

        Raises:
            LimitError: A limit is exceeded; nothing is counted.
        """
        limits = self._keys.ring.limits_of(tenant)
        if limits.max_requests is not None:
            self._check_requests(tenant, num_sequences, limits.max_requests)
        if (rate := limits.tokens_per_minute) is not None:
            self._check_tokens(tenant, num_prompt_tokens, rate)
        self._num_open[tenant] += num_sequences
        self._pay(tenant, num_prompt_tokens)

    def end(self, tenant: str, *, num_sequences: int) -> None:
        """Count sequences as ended."""
        self._num_open[tenant] -= num_sequences
        if not self._num_open[tenant]:
            del self._num_open[tenant]

    def headers(self, tenant: str) -> dict[str, str]:
        """Return OpenAI's headers about what is left of a tenant's limits."""
        limits, headers = self._keys.ring.limits_of(tenant), dict[str, str]()
        if (most := limits.max_requests) is not None:
            left = max(0, most - self._num_open[tenant])
            headers |= _headers("requests", most, left, 0.0 if left else _RETRY_S)
        if (rate := limits.tokens_per_minute) is not None:
            level = self._bucket(tenant, rate).level
            headers |= _headers(
                "tokens", rate, max(0, math.floor(level)), (rate - level) * 60 / rate
            )
        return headers

    def _check_requests(self, tenant: str, number: int, most: int) -> None:
        there = self._num_open[tenant]
        if number > most:
            raise LimitError(
                f"This request asks for {number} sequences at once, and the limit is {most}: ask "
                f"for fewer.",
                what="requests",
            )
        if there + number > most:
            raise LimitError(
                f"Rate limit reached for requests under way. Limit: {most}, under way: {there}, "
                f"requested: {number}. Try again when one has ended.",
                what="requests",
                retry_after_s=_RETRY_S,
            )

    def _check_tokens(self, tenant: str, number: int, rate: int) -> None:
        level = self._bucket(tenant, rate).level
        # A prompt of more than a minute's worth waits for a full bucket, and is paid back later.
        if (missing := min(number, rate) - level) > 0:
            wait_s = missing * 60 / rate
            raise LimitError(
                f"Rate limit reached for tokens per minute. Limit: {rate}, left: "
                f"{max(0, math.floor(level))}, requested: {number}. Please try again in "
                f"{_duration(wait_s)}.",
                what="tokens",
                retry_after_s=wait_s,
            )

    def _bucket(self, tenant: str, rate: int) -> _Bucket:
        """Return a tenant's bucket, filled up to the present."""
        now_s = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(level=rate, time_s=now_s))
        bucket.level = min(rate, bucket.level + (now_s - bucket.time_s) * rate / 60)
        bucket.time_s = now_s
        return bucket

    def _pay(self, tenant: str, number: int) -> None:
        if (rate := self._keys.ring.limits_of(tenant).tokens_per_minute) is not None:
            self._bucket(tenant, rate).level -= number

    # -- reports of the engine (EngineListener) ------------------------------------------

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        pass

    def engine_reported(self, report: StepReport) -> None:
        for chunk in report.chunks:
            if (
                chunk.tokens
                and (entry := self._ledger.find(chunk.request)) is not None
                and not entry.is_batch
            ):
                self._pay(entry.tenant, len(chunk.tokens))


def _headers(what: str, limit: int, left: int, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(left),
        f"x-ratelimit-reset-{what}": _duration(reset_s),
    }


def _duration(seconds: float) -> str:
    """Return a duration as text, such as 6m0s, 1.5s or 120ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
