"""Errors of modelled devices against whole measured engines, by the size of the model.

The operators of a modelled device take what others measured of such operators
(`coserve.simulate.hardware`), which adds up to less time than a whole engine takes.
"""

from math import log2
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """A fine-tuning speed that was measured, and the same modelled."""

    chips: tuple[str, ...]
    """Names of the measured device, and of others with the same chip."""
    model: str
    """Name of the model."""
    num_parameters: float
    """Number of parameters."""
    pairs: tuple[tuple[float, float], ...]
    """Tokens per second: modelled and measured."""
    setting: str
    """Setting of the measurement, and who measured."""
    source: str
    """Page with both numbers."""

    @property
    def errors(self) -> list[float]:
        """Return the share by which more is modelled than was measured, for each pair."""
        return [modelled / measured - 1 for modelled, measured in self.pairs]


_FLEXLLM = {
    "setting": (
        "beside 4 and 20 requests/s on four pipelines, under FlexLLM's policy (its paper, section "
        "8)"
    ),
    "source": "benchmarks/papers.md, figure 10",
}
_HERE = {
    "setting": "by itself, in sequences of 512 tokens, on this engine",
    "source": "benchmarks/gpu.md, benchmarks/hardware.md",
}
_AMPERE, _HOPPER = ("A100", "A100 40 GB"), ("H200", "H100")
MEASURED = (
    Measured(_AMPERE, "LLaMA-3.1-8B", 8.0e9, ((15_841, 9_400), (12_677, 7_200)), **_FLEXLLM),
    Measured(_AMPERE, "Qwen2.5-14B", 14.8e9, ((16_023, 3_700), (12_934, 2_200)), **_FLEXLLM),
    Measured(_AMPERE, "Qwen2.5-32B", 32.8e9, ((14_562, 3_200), (11_402, 2_200)), **_FLEXLLM),
    Measured(_HOPPER, "LLaMA-3.1-8B", 8.0e9, ((15_990, 8_074),), **_HERE),
    Measured(_HOPPER, "Qwen2.5-0.5B", 0.49e9, ((64_320, 29_694), (64_320, 29_383)), **_HERE),
)


def model_error(hardware: str, num_parameters: int) -> dict[str, Any]:
    """Return the errors of the measurement nearest in size, on the same chip if there is one, as
    JSON with words for readers.
    """

    def distance(each: Measured) -> tuple[float, ...]:
        doublings = abs(log2(each.num_parameters / num_parameters))
        return round(doublings), hardware not in each.chips, doublings

    nearest = min(MEASURED, key=distance)
    low, high = min(nearest.errors), max(nearest.errors)
    return {
        "tuning_tokens_per_s": round(high, 2),
        "tuning_tokens_per_s_least": round(low, 2),
        "measured": {
            "hardware": nearest.chips[0],
            "model": nearest.model,
            "source": nearest.source,
        },
        "words": (
            "The devices are modelled by published measurements of their operators, which is "
            "optimistic for a whole engine. The nearest measurement of a whole engine is "
            f"{nearest.model} on {nearest.chips[0]}: {nearest.setting}, the model trains "
            f"{_times(low, high)} the measured tokens/s ({nearest.source}). Shares and costs of "
            "separate devices err less, since both sides are modelled."
        ),
    }


def _times(least: float, most: float) -> str:
    low, high = f"{1 + least:.2g}", f"{1 + most:.2g}"
    return f"{low} times" if low == high else f"{low} to {high} times"
