"""Synthetic arrivals from a seed: quiet times and bursts, Poisson and Gamma arrivals, and the curve
of a day.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from random import Random
from typing import Protocol

from coserve.workloads.traces import TracedRequest

# Spread of lengths (of their logarithm), as in traces of chats.
_SIGMA = 0.6


class LengthSource(Protocol):
    """A source of the lengths of requests."""

    def draw(self, random: Random) -> tuple[int, int]:
        """Return the tokens of a prompt and of its answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Log-normal lengths around two means, at most four times as many."""

    mean_prompt_tokens: float = 32
    """Mean tokens of prompts."""
    mean_output_tokens: float = 32
    """Mean tokens of answers."""

    def draw(self, random: Random) -> tuple[int, int]:
        return _length(random, self.mean_prompt_tokens), _length(random, self.mean_output_tokens)


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths of a recorded set, each pair as likely as any other."""

    pairs: Sequence[tuple[int, int]]
    """Tokens of prompts and answers, such as `read_lengths` returns."""

    def draw(self, random: Random) -> tuple[int, int]:
        return random.choice(self.pairs)


def bursty(
    *,
    rate: float,
    seconds: float,
    seed: int,
    burst_factor: float = 6.0,
    quiet_s: float = 8.0,
    burst_s: float = 3.0,
    lengths: LengthSource | None = None,
) -> list[TracedRequest]:
    """Return quiet times and bursts of a Markov-modulated Poisson process, with exactly `rate ×
    seconds` requests.

    Args:
        rate: Mean requests per second, over quiet times and bursts.
        burst_factor: Ratio of the rate in a burst to the quiet rate.
        quiet_s: Mean length of quiet times.
        burst_s: Mean length of bursts.
    """
    random = Random(seed)
    bends, mass, bursting = [(0.0, 0.0)], 0.0, False
    while bends[-1][0] < seconds:
        now_s = bends[-1][0]
        until_s = min(seconds, now_s + random.expovariate(1 / (burst_s if bursting else quiet_s)))
        mass += (until_s - now_s) * (burst_factor if bursting else 1.0)
        bends.append((until_s, mass))
        bursting = not bursting
    return _with_lengths(_arrivals(bends, round(rate * seconds), random), lengths, random)


def poisson(
    *, rate: float, seconds: float, seed: int, lengths: LengthSource | None = None
) -> list[TracedRequest]:
    """Return independent arrivals, with exactly `rate × seconds` requests."""
    random = Random(seed)
    return _with_lengths(
        _arrivals([(0.0, 0.0), (seconds, 1.0)], round(rate * seconds), random), lengths, random
    )


def gamma(
    *,
    rate: float,
    seconds: float,
    seed: int,
    variation: float = 2.0,
    lengths: LengthSource | None = None,
) -> list[TracedRequest]:
    """Return arrivals with Gamma-distributed times between them, with exactly `rate × seconds`
    requests.

    Args:
        variation: Standard deviation of the times between arrivals over their mean: 1 is a Poisson
            process, more is burstier.
    """
    random, num_requests = Random(seed), round(rate * seconds)
    shape = 1 / variation**2
    sums = list(accumulate(random.gammavariate(shape, 1.0) for _ in range(num_requests + 1)))
    times = [seconds * value / sums[-1] for value in sums[:-1]]
    return _with_lengths(times, lengths, random)


def daily(
    hours: Sequence[float],
    *,
    rate: float,
    hour_s: float = 3600.0,
    seed: int,
    lengths: LengthSource | None = None,
) -> list[TracedRequest]:
    """Return Poisson arrivals whose intensity follows the requests of each hour of a day, at this
    mean rate over all of it.

    Args:
        hour_s: Seconds of an hour of the curve; less for a short version of the day.
    """
    random = Random(seed)
    sums = [0.0, *accumulate(float(each) for each in hours)]
    bends = [(index * hour_s, mass) for index, mass in enumerate(sums)]
    return _with_lengths(
        _arrivals(bends, round(rate * hour_s * len(hours)), random), lengths, random
    )


def _arrivals(bends: Sequence[tuple[float, float]], number: int, random: Random) -> Iterator[float]:
    """Return a given number of arrivals of a Poisson process: uniform in the intensity's integral,
    which is linear between these bends.
    """
    return _inverse(bends, sorted(random.uniform(0.0, bends[-1][1]) for _ in range(number)))


def _inverse(bends: Sequence[tuple[float, float]], marks: Sequence[float]) -> Iterator[float]:
    """Yield the moments at which the integral reaches each of the marks, which rise."""
    index = 0
    for mark in marks:
        while bends[index + 1][1] < mark:
            index += 1
        (start_s, before), (end_s, after) = bends[index : index + 2]
        yield start_s + (end_s - start_s) * (mark - before) / (after - before)


def _with_lengths(
    times: Iterator[float] | Sequence[float], lengths: LengthSource | None, random: Random
) -> list[TracedRequest]:
    lengths = lengths or LogNormalLengths()
    drawn = ((at_s, *lengths.draw(random)) for at_s in times)
    return [
        TracedRequest(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=out)
        for at_s, prompt, out in drawn
    ]


def _length(random: Random, mean: float) -> int:
    value = random.lognormvariate(log(mean) - _SIGMA**2 / 2, _SIGMA)
    return max(1, round(min(value, 4 * mean)))
