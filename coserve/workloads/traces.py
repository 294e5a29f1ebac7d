"""When requests come, and how long they are: bursty traces from a seed, and recorded ones from files.

Files are CSV with a header row, plain or gzipped: Azure's (`arrival_s,context_tokens,generated_tokens`), BurstGPT's
(`timestamp_s,request_tokens,response_tokens`), and lengths alone, as of ShareGPT (`prompt_tokens,output_tokens`).
"""

import csv
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random

from coserve.errors import DataError

# What traces call the moment of arrival, the tokens of the prompt, and those of the answer.
_TIMES = ("arrival_s", "timestamp_s")
_PROMPTS = ("context_tokens", "request_tokens", "prompt_tokens")
_OUTPUTS = ("generated_tokens", "response_tokens", "output_tokens")
# Spread of lengths (of their logarithm), as in traces of chats.
_SIGMA = 0.6


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """A request of a trace: seconds from the trace's start, and tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of prompts and answers: log-normal around these means, at most four times as many."""

    mean_prompt_tokens: float = 32
    mean_output_tokens: float = 32

    def draw(self, random: Random) -> tuple[int, int]:
        """One of each."""
        return _length(random, self.mean_prompt_tokens), _length(random, self.mean_output_tokens)


def bursty(
    *,
    rate: float,
    seconds: float,
    seed: int,
    burst_factor: float = 6.0,
    quiet_s: float = 8.0,
    burst_s: float = 3.0,
    lengths: Lengths | None = None,
) -> list[TracedRequest]:
    """Quiet times and bursts, as a Markov-modulated Poisson process has them, with exactly `rate × seconds` requests.

    Args:
        rate: mean requests per second, over quiet times and bursts.
        burst_factor: the rate in a burst, as a multiple of the quiet rate.
        quiet_s, burst_s: mean lengths of the two.
    """
    random = Random(seed)
    # The intensity's integral, at the moments where it bends; given their number, arrivals of a Poisson process are
    # uniform in it.
    bends, mass, bursting = [(0.0, 0.0)], 0.0, False
    while bends[-1][0] < seconds:
        now_s = bends[-1][0]
        until_s = min(seconds, now_s + random.expovariate(1 / (burst_s if bursting else quiet_s)))
        mass += (until_s - now_s) * (burst_factor if bursting else 1.0)
        bends.append((until_s, mass))
        bursting = not bursting
    marks = sorted(random.uniform(0.0, mass) for _ in range(round(rate * seconds)))
    return _with_lengths(_inverse(bends, marks), lengths or Lengths(), random)


def gamma(
    *, rate: float, seconds: float, seed: int, variation: float = 2.0, lengths: Lengths | None = None
) -> list[TracedRequest]:
    """Gamma-distributed times between arrivals, with exactly `rate × seconds` requests.

    variation: standard deviation of the times between arrivals over their mean: 1 is a Poisson process, more is
        burstier.
    """
    random, num_requests = Random(seed), round(rate * seconds)
    shape = 1 / variation**2
    sums = list(accumulate(random.gammavariate(shape, 1.0) for _ in range(num_requests + 1)))
    times = [seconds * value / sums[-1] for value in sums[:-1]]
    return _with_lengths(times, lengths or Lengths(), random)


def read_trace(path: str | Path, *, where: dict[str, str] | None = None) -> list[TracedRequest]:
    """A recorded trace, from its first arrival on.

    Args:
        where: rows with these values in these columns alone, such as {"slice": "dense"}.

    Raises:
        DataError: no such file, no such columns, or a line that is none of a trace.
    """
    requests = []
    for number, row in _rows(path, (_TIMES, _PROMPTS, _OUTPUTS), where or {}):
        try:
            at_s, prompt, output = float(row[0]), int(row[1]), int(row[2])
        except ValueError:
            raise DataError(f"{path}, line {number}: {', '.join(row)} are no seconds and numbers of tokens") from None
        requests.append(TracedRequest(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output))
    if not requests:
        raise DataError(f"{path} has no requests")
    requests.sort(key=lambda request: request.at_s)
    first_s = requests[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in requests]


def read_lengths(path: str | Path) -> list[tuple[int, int]]:
    """Tokens of prompts and answers; DataError as `read_trace`."""
    lengths = []
    for number, row in _rows(path, (_PROMPTS, _OUTPUTS), {}):
        try:
            lengths.append((int(row[0]), int(row[1])))
        except ValueError:
            raise DataError(f"{path}, line {number}: {', '.join(row)} are no numbers of tokens") from None
    return lengths


def adapt(
    trace: Sequence[TracedRequest],
    *,
    start_s: float = 0.0,
    rate: float | None = None,
    seconds: float | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[TracedRequest]:
    """A trace for a smaller machine: from start_s on, time runs so that the arrivals of the whole have this mean rate,
    for this many seconds; lengths are cut.
    """
    factor = 1.0
    if rate is not None and len(trace) > 1:
        factor = (len(trace) - 1) / (trace[-1].at_s - trace[0].at_s) / rate
    adapted = [
        TracedRequest(
            at_s=(request.at_s - start_s) * factor,
            num_prompt_tokens=_cut(request.num_prompt_tokens, max_prompt_tokens),
            num_output_tokens=_cut(request.num_output_tokens, max_output_tokens),
        )
        for request in trace
        if request.at_s >= start_s
    ]
    return [request for request in adapted if seconds is None or request.at_s < seconds]


def _inverse(bends: Sequence[tuple[float, float]], marks: Sequence[float]) -> Iterator[float]:
    """The moments at which the integral reaches each of the marks, which rise."""
    index = 0
    for mark in marks:
        while bends[index + 1][1] < mark:
            index += 1
        (start_s, before), (end_s, after) = bends[index : index + 2]
        yield start_s + (end_s - start_s) * (mark - before) / (after - before)


def _with_lengths(times: Iterator[float] | list[float], lengths: Lengths, random: Random) -> list[TracedRequest]:
    drawn = ((at_s, *lengths.draw(random)) for at_s in times)
    return [TracedRequest(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=out) for at_s, prompt, out in drawn]


def _length(random: Random, mean: float) -> int:
    value = random.lognormvariate(log(mean) - _SIGMA**2 / 2, _SIGMA)
    return max(1, round(min(value, 4 * mean)))


def _cut(length: int, most: int | None) -> int:
    return max(1, length if most is None else min(length, most))


def _rows(
    path: str | Path, columns: Sequence[Sequence[str]], where: dict[str, str]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line number and the wanted columns, each by the first of its names that the file has."""
    try:
        with gzip.open(path, "rt", newline="") if str(path).endswith(".gz") else open(path, newline="") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or ()
            names = [next((name for name in options if name in header), None) for options in columns]
            for name, options in zip(names, columns, strict=True):
                if name is None:
                    raise DataError(f"{path} has no column {' or '.join(options)}: it has {', '.join(header)}")
            unknown = sorted(where.keys() - set(header))
            if unknown:
                raise DataError(f"{path} has no column {unknown[0]}: it has {', '.join(header)}")
            for row in reader:
                if all(row[name] == value for name, value in where.items()):
                    yield reader.line_num, tuple(row[name] or "" for name in names if name is not None)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
