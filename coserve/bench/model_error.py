"""How far modelled devices are off, by the size of the model: what they make of settings that were
measured as a whole.

A device's operators are modelled by what others measured of such ones
(`coserve.simulate.hardware`); that adds up to less time than a whole engine takes.
"""

from math import log2
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """Fine-tuning that was measured, and the same modelled: pairs of tokens/s, modelled and
    measured.

    chips: the device, and others with the same chip. setting: and whose number it is. source: of
    both.
    """

    chips: tuple[str, ...]
    model: str
    num_parameters: float
    pairs: tuple[tuple[float, float], ...]
    setting: str
    source: str

    @property
    def errors(self) -> list[float]:
        """By which share more is modelled than was measured."""
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
    """As JSON, with words for readers: of what was measured nearest in size, on this chip if there
    is such a one.
    """

    def distance(each: Measured) -> tuple[float, ...]:
        doublings = abs(log2(each.num_parameters / num_parameters))
        return round(doublings), hardware not in each.chips, doublings

    found = min(MEASURED, key=distance)
    least, most = min(found.errors), max(found.errors)
    return {
        "tuning_tokens_per_s": round(most, 2),
        "tuning_tokens_per_s_least": round(least, 2),
        "measured": {"hardware": found.chips[0], "model": found.model, "source": found.source},
        "words": (
            "The devices are modelled by what others measured of their operators, which is "
            "optimistic for the whole. "
            f"Of what was measured as a whole, {found.model} on {found.chips[0]} is nearest: "
            f"{found.setting} it trains "
            f"{_times(least, most)} the tokens/s modelled that it did when measured "
            f"({found.source}). Shares and costs "
            "of separate devices err less, since both sides are modelled."
        ),
    }


def _times(least: float, most: float) -> str:
    low, high = f"{1 + least:.2g}", f"{1 + most:.2g}"
    return f"{low} times" if low == high else f"{low} to {high} times"
