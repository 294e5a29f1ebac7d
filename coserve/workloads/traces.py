"""Recorded traces: arrivals and lengths of requests. Files are CSV or JSONL, plain or gzipped, as
published.

Known are Azure's (`TIMESTAMP,ContextTokens,GeneratedTokens`, a date and time), BurstGPT's
(`Timestamp,Model,Request tokens,Response tokens,…`, seconds; requests without an answer failed
there, and are left out), the same with `arrival_s` or `timestamp_s`, those of Sarathi-Serve and
Vidur (`arrived_at,num_prefill_tokens,num_decode_tokens`), lengths alone, as of ShareGPT
(`prompt_tokens,output_tokens`, or as there), and requests by hour of the day
(`hour_of_day,requests`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from coserve.errors import DataError
from coserve.workloads.files import read_columns, read_records

# What traces call the moment of arrival, the tokens of the prompt, and those of the answer.
_TIMES = ("arrival_s", "timestamp_s", "timestamp", "arrived_at")
_PROMPTS = ("context_tokens", "request_tokens", "prompt_tokens", "num_prefill_tokens")
_OUTPUTS = ("generated_tokens", "response_tokens", "output_tokens", "num_decode_tokens")
# Names the pieces of a longer recording that a file was put together from.
_SLICE, _MAX_NAMED = "slice", 4
_HOURS = 24


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """A request of a trace."""

    at_s: float
    """Arrival in seconds from the trace's start."""
    num_prompt_tokens: int
    """Tokens of its prompt."""
    num_output_tokens: int
    """Tokens of its answer."""


class TracedJob(NamedTuple):
    """A job of a trace."""

    at_s: float
    """Submission in seconds from the trace's start."""
    num_gpus: int
    """GPUs that it took."""
    duration_s: float
    """Seconds for which it took them."""


def read_jobs(path: str | Path) -> list[TracedJob]:
    """Return the jobs of a file as of Philly's trace (`submit_s,num_gpus,duration_s`).

    Raises:
        DataError: As `read_trace`.
    """
    jobs = []
    for number, row in read_columns(path, (("submit_s",), ("num_gpus",), ("duration_s",))):
        try:
            job = TracedJob(_seconds(row[0]), _tokens(row[1]), _seconds(row[2]))
        except ValueError:
            raise DataError(
                f"{path}, line {number}: {', '.join(row)} are not a time, a number of GPUs and "
                "seconds"
            ) from None
        if job.num_gpus and job.duration_s > 0:
            jobs.append(job)
    if not jobs:
        raise DataError(f"{path} has no jobs")
    return jobs


def read_trace(path: str | Path, *, where: Mapping[str, str] | None = None) -> list[TracedRequest]:
    """Return a recorded trace, from its first arrival on.

    Args:
        where: Values that columns must have, such as {"slice": "dense"}.

    Raises:
        DataError: There is no such file or column, a line is not of a trace, or rows are of several
            slices: the time between these is not time without requests.
    """
    requests, slices = [], dict[str, None]()
    for number, row in read_columns(path, (_TIMES, _PROMPTS, _OUTPUTS), where, optional=(_SLICE,)):
        try:
            at_s, prompt, output = _seconds(row[0]), _tokens(row[1]), _tokens(row[2])
        except ValueError:
            cells = ", ".join(row[:3])
            raise DataError(
                f"{path}, line {number}: {cells} are no seconds and numbers of tokens"
            ) from None
        if prompt and output:
            requests.append(
                TracedRequest(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output)
            )
            slices[row[3]] = None
    if not requests:
        asked = ", ".join(f"{column}={value}" for column, value in (where or {}).items())
        raise DataError(f"{path} has no requests{f' with {asked}' if asked else ''}")
    if len(slices) > 1:
        named = ", ".join([*slices][:_MAX_NAMED]) + (", …" if len(slices) > _MAX_NAMED else "")
        raise DataError(
            f"{path} has {len(slices)} slices of a longer trace ({named}): choose one, with "
            f"--where {_SLICE}={next(iter(slices))}"
        )
    requests.sort(key=lambda request: request.at_s)
    first_s = requests[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in requests]


def read_lengths(path: str | Path) -> list[tuple[int, int]]:
    """Return the tokens of prompts and answers.

    Raises:
        DataError: As `read_trace`.
    """
    lengths = []
    for number, row in read_columns(path, (_PROMPTS, _OUTPUTS)):
        try:
            lengths.append((_tokens(row[0]), _tokens(row[1])))
        except ValueError:
            raise DataError(
                f"{path}, line {number}: {', '.join(row)} are not numbers of tokens"
            ) from None
    if not lengths:
        raise DataError(f"{path} has no lengths")
    return lengths


def is_day(path: str | Path) -> bool:
    """Return whether a file has requests by hour of the day, and no arrivals.

    Raises:
        DataError: It cannot be read.
    """
    _, record = next(read_records(path), (0, dict[str, str]()))
    return "hour_of_day" in record


def read_day(path: str | Path) -> list[int]:
    """Return the requests of each hour of the day, from midnight on.

    Raises:
        DataError: As `read_trace`; or an hour is missing.
    """
    hours: dict[int, int] = {}
    for number, row in read_columns(path, (("hour_of_day",), ("requests",))):
        try:
            hours[int(row[0])] = _tokens(row[1])
        except ValueError:
            raise DataError(
                f"{path}, line {number}: {', '.join(row)} are no hour and number of requests"
            ) from None
    if sorted(hours) != list(range(_HOURS)) or not any(hours.values()):
        raise DataError(
            f"{path} must have requests of each hour from 0 to {_HOURS - 1}, not {sorted(hours)}"
        )
    return [hours[hour] for hour in range(_HOURS)]


def rescale(
    trace: Sequence[TracedRequest], *, rate: float, seconds: float, skip: int = 0
) -> list[TracedRequest]:
    """Return as many requests in a row as arrive within some seconds at this mean rate, with time
    stretched so that they do: bursts and quiet times keep their shape, and the requests of a higher
    rate begin with those of a lower one. A trace that has fewer is repeated from its start.

    Args:
        skip: Number of requests that are left out before them.
    """
    number = max(1, round(rate * seconds))
    # The time after the last request is not recorded: a mean one.
    period_s = (trace[-1].at_s - trace[0].at_s) * len(trace) / max(1, len(trace) - 1) or 1.0

    def at_s(index: int) -> float:
        turn, place = divmod(index, len(trace))
        return turn * period_s + trace[place].at_s

    start_s = at_s(skip)
    span_s = at_s(skip + number) - start_s
    factor = number / rate / span_s if span_s > 0 else 0.0
    return [
        replace(trace[index % len(trace)], at_s=(at_s(index) - start_s) * factor)
        for index in range(skip, skip + number)
    ]


def scale_lengths(trace: Sequence[TracedRequest], factor: float) -> list[TracedRequest]:
    """Return the trace with prompts and answers this many times as long, of a token at least."""
    return [
        replace(
            request,
            num_prompt_tokens=max(1, round(factor * request.num_prompt_tokens)),
            num_output_tokens=max(1, round(factor * request.num_output_tokens)),
        )
        for request in trace
    ]


def adapt(
    trace: Sequence[TracedRequest],
    *,
    start_s: float = 0.0,
    rate: float | None = None,
    seconds: float | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[TracedRequest]:
    """Return a trace for a smaller machine: from start_s on, time runs so that the arrivals of the
    whole have this mean rate, for this many seconds; lengths are cut.
    """
    factor = 1.0
    # Requests that all come at once do so at any rate.
    if rate is not None and trace and (span_s := trace[-1].at_s - trace[0].at_s) > 0:
        factor = (len(trace) - 1) / span_s / rate
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


def _cut(length: int, most: int | None) -> int:
    return max(1, length if most is None else min(length, most))


def _seconds(text: str) -> float:
    """Return a moment given in seconds, or as a date and time (without a zone: UTC).

    Raises:
        ValueError: The text is neither.
    """
    try:
        value = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not isfinite(value):
        raise ValueError(f"{text} is not a time")
    return value


def _tokens(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(f"{text} is below 0")
    return value
