"""The promise about a request's latency (SLO), its default, and the tightest that a device can
hold.
"""

from dataclasses import dataclass

from coserve.scheduling.latency import LatencyModel

# The default TPOT: a decode step alone as many times, for company; and no less than this. Readers
# take in some five words a second; and FlexLLM (table 2) advises against sharing a device below 25
# ms per token.
DEFAULT_TPOT_STEPS, MIN_DEFAULT_TPOT_S = 2.5, 0.025
# Tokens in the cache of the request that stands for a decode step alone.
SOLO_CONTEXT = 512
# No promise is tighter than what the request takes alone on the device, times this: predictions
# err, and steps that run when it arrives must end first.
MIN_TIMES_ALONE = 1.25
# From what share of it on a default TPOT is changed, when predictions change.
_MIN_CHANGE = 0.05


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The latency promised to a request."""

    ttft_s: float
    """Seconds to its first token."""
    tpot_s: float
    """Mean seconds between later tokens."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} must be a number of seconds above 0, not {getattr(self, name)!r}"
                )


def default_tpot_s(latency: LatencyModel) -> float:
    """Return the TPOT of requests that bring none, as the latency model now predicts the device."""
    return max(
        MIN_DEFAULT_TPOT_S,
        DEFAULT_TPOT_STEPS * latency.decode_s(num_requests=1, context=SOLO_CONTEXT),
    )


class DefaultSlo:
    """The SLO of requests that bring none."""

    def __init__(self, latency: LatencyModel, *, ttft_s: float, tpot_s: float | None) -> None:
        """Set the default; a tpot_s of None follows the device."""
        self._latency, self._follows = latency, tpot_s is None
        self._value = Slo(ttft_s=ttft_s, tpot_s=tpot_s or default_tpot_s(latency))

    @property
    def value(self) -> Slo:
        """Return the present default. Once it is set, it no longer follows the device."""
        return self._value

    @value.setter
    def value(self, slo: Slo) -> None:
        self._value, self._follows = slo, False

    def follow_device(self) -> None:
        """Update the TPOT after predictions have changed, if it follows the device."""
        if not self._follows:
            return
        tpot_s = default_tpot_s(self._latency)
        if abs(tpot_s - self._value.tpot_s) > _MIN_CHANGE * self._value.tpot_s:
            self._value = Slo(ttft_s=self._value.ttft_s, tpot_s=tpot_s)


def feasible_slo(
    slo: Slo, default: Slo, latency: LatencyModel, *, num_prompt_tokens: int, max_tokens: int
) -> Slo:
    """Return the SLO itself (the same object), or one in which what the device cannot hold is
    replaced.

    What cannot be held, even by this request alone, becomes the default: the tightest promise that
    could be held would take all of the device for one request, and leave others and jobs nothing.

    Args:
        default: SLO of requests that bring none.
        max_tokens: Maximum number of tokens of its output.
    """
    # On average, decode steps see half of the output.
    context = num_prompt_tokens + max_tokens // 2
    ttft_s = MIN_TIMES_ALONE * latency.prompt_s(num_prompt_tokens)
    tpot_s = MIN_TIMES_ALONE * latency.decode_s(num_requests=1, context=context)
    if slo.ttft_s >= ttft_s and slo.tpot_s >= tpot_s:
        return slo
    return Slo(
        ttft_s=slo.ttft_s if slo.ttft_s >= ttft_s else max(default.ttft_s, ttft_s),
        tpot_s=slo.tpot_s if slo.tpot_s >= tpot_s else max(default.tpot_s, tpot_s),
    )
