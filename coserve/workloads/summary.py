"""A summary of a run: percentiles, and the share of requests that held their SLOs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RequestOutcome:
    """The course of a request, as its sender saw it, in seconds; moments are from the trace's
    start.
    """

    index: int
    """Number of the request in the trace."""
    arrival_s: float
    """Time of arrival in the trace."""
    end_s: float
    """Time of its end."""
    ttft_s: float | None = None
    """Time to the first token, from the trace's arrival on, so that a late sender counts against
    the server, not for it.
    """
    tpot_s: float | None = None
    """Mean time per token after the first."""
    gaps_s: tuple[float, ...] = ()
    """Times between the pieces of the answer."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt."""
    num_output_tokens: int = 0
    """Tokens of the answer."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were cached."""
    finish_reason: str | None = None
    """Reason why the answer ended."""
    error: str | None = None
    """Error in one line, if it failed."""

    def attained(self, *, ttft_s: float, tpot_s: float) -> bool:
        """Return whether both SLOs were held; a request that failed held none."""
        if self.error is not None or self.ttft_s is None:
            return False
        return self.ttft_s <= ttft_s and (self.tpot_s is None or self.tpot_s <= tpot_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that so large a share does not exceed; nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def summarize(
    outcomes: Sequence[RequestOutcome], *, ttft_s: float, tpot_s: float
) -> dict[str, Any]:
    """Return a summary as JSON: counts, percentiles in milliseconds (null without a value), the
    share that held both SLOs, and goodput: the number of those per second.
    """
    firsts = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    means = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    attained = [outcome.attained(ttft_s=ttft_s, tpot_s=tpot_s) for outcome in outcomes]
    tokens = sum(outcome.num_output_tokens for outcome in outcomes)
    lasted_s = max((outcome.end_s for outcome in outcomes), default=0.0)
    return {
        "requests": len(outcomes),
        "failed": sum(outcome.error is not None for outcome in outcomes),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / lasted_s, 2) if lasted_s else None,
        "attainment": sum(attained) / len(attained) if attained else None,
        "goodput_per_s": round(sum(attained) / lasted_s, 4) if lasted_s else None,
        **{
            f"{name}_ms": {
                "p50": _ms(percentile(values, 0.5)),
                "p99": _ms(percentile(values, 0.99)),
            }
            for name, values in (("ttft", firsts), ("tpot", means), ("gap", gaps))
        },
    }


def _ms(value_s: float) -> float | None:
    return None if isnan(value_s) else round(1e3 * value_s, 3)
