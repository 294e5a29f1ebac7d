"""Plans: how much fine-tuning a trace leaves over, hour by hour, on how many devices, and what
separate devices would cost.

Devices are modelled. There are as many as requests alone need in the busiest hour. The default
policy serves a sample of each hour on one of them, which gets every n-th request, beside a job that
never ends. Separate devices are the same ones for requests, and as many more as train the same
number of tokens in the same hours by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from coserve.bench.cells import (
    ATTAINMENT,
    JOBS_ALONE,
    Bench,
    CompareConfig,
    Watch,
    fitting_factor,
    milliseconds,
    rounded,
)
from coserve.bench.places import ModelledPlace
from coserve.scheduling.policies import DEFAULT_POLICY
from coserve.scheduling.slo import DEFAULT_TPOT_STEPS, Slo
from coserve.workloads.arrivals import LengthSource, poisson
from coserve.workloads.traces import TracedRequest, rescale, scale_lengths

_HOUR_S = 3600.0
# A last piece of a trace that is shorter than this belongs to the hour before it.
_MIN_HOUR_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Hour:
    """Requests of an hour, or of a part of it for a short trace."""

    seconds: float
    """Length."""
    rate: float
    """Requests per second."""
    requests: Sequence[TracedRequest]
    """Arrivals and lengths, or a sample of them."""


@dataclass(frozen=True, kw_only=True)
class HourPlan:
    """Fine-tuning that an hour leaves over."""

    rate: float
    """Requests per second."""
    seconds: float
    """Length of the hour."""
    attainment: float
    """Share of requests that hold their SLOs beside jobs."""
    tuning_tokens_per_s: float
    """Tokens trained per second on all devices."""

    @property
    def tuning_tokens(self) -> float:
        return self.tuning_tokens_per_s * self.seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a trace."""

    place: str
    """Name of the device."""
    slo: Slo
    """SLO of all requests."""
    length_factor: float
    """Factor of all lengths."""
    saturation: float
    """Requests per second that a device holds without jobs."""
    num_devices: int
    """Number of devices."""
    hours: Sequence[HourPlan]
    """Plans of the hours."""
    alone_tokens_per_s: float
    """Tokens per second that a device trains that does nothing else."""
    price: float
    """Price of a device per hour."""

    @property
    def num_hours(self) -> float:
        return sum(hour.seconds for hour in self.hours) / _HOUR_S

    @property
    def tuning_tokens(self) -> float:
        return sum(hour.tuning_tokens for hour in self.hours)

    @property
    def num_more_devices(self) -> float:
        """Return the number of devices that would train as much by themselves in the same time; a
        fraction, as work can be put off.
        """
        return self.tuning_tokens / (self.alone_tokens_per_s * self.num_hours * _HOUR_S)

    def result(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        shared = self.num_devices * self.num_hours * self.price
        separate = (self.num_devices + ceil(self.num_more_devices)) * self.num_hours * self.price
        return {
            "place": self.place,
            "slo_ttft_ms": milliseconds(self.slo.ttft_s),
            "slo_tpot_ms": milliseconds(self.slo.tpot_s),
            "length_factor": self.length_factor,
            "saturation_rate": rounded(self.saturation),
            "devices": self.num_devices,
            "hours": rounded(self.num_hours),
            "tuning_tokens": round(self.tuning_tokens),
            "alone_tokens_per_s": rounded(self.alone_tokens_per_s),
            "separate_devices": self.num_devices + ceil(self.num_more_devices),
            "separate_tuning_devices_exact": rounded(self.num_more_devices),
            "price_per_device_hour": self.price,
            "cost": rounded(shared),
            "separate_cost": rounded(separate),
            "rows": [
                {
                    "hour": index,
                    "rate": rounded(hour.rate),
                    "attainment": round(hour.attainment, 4),
                    "tuning_tokens_per_s": rounded(hour.tuning_tokens_per_s),
                    "tuning_tokens": round(hour.tuning_tokens),
                }
                for index, hour in enumerate(self.hours)
            ],
        }


def hours_of_trace(trace: Sequence[TracedRequest], rate: float | None = None) -> list[Hour]:
    """Return a recorded trace by hours.

    Args:
        trace: The trace.
        rate: Mean requests per second over the whole trace, in place of its own.
    """
    # One mean gap after the last request, so that the rate counts every request.
    end_s = trace[-1].at_s * len(trace) / max(1, len(trace) - 1) or 1.0
    factor = 1.0 if rate is None else rate * end_s / len(trace)
    starts_s = [index * _HOUR_S for index in range(max(1, ceil((end_s - _MIN_HOUR_S) / _HOUR_S)))]
    hours = []
    for start_s, stop_s in zip(starts_s, [*starts_s[1:], end_s], strict=True):
        # The time after the last request belongs to the last hour.
        requests = [
            each
            for each in trace
            if start_s <= each.at_s < stop_s or (stop_s == end_s <= each.at_s)
        ]
        seconds = stop_s - start_s
        hours.append(
            Hour(seconds=seconds, rate=factor * len(requests) / seconds, requests=requests)
        )
    return hours


def hours_of_day(
    requests: Sequence[int], *, rate: float, sample_s: float, lengths: LengthSource, seed: int
) -> list[Hour]:
    """Return a day of which only the number of requests of each hour is known, with Poisson
    arrivals.

    Args:
        requests: Number of requests of each hour, in any unit.
        rate: Mean requests per second over the day.
        sample_s: Seconds of each hour that are simulated.
        lengths: Lengths of prompts and answers.
        seed: Seed of arrivals and lengths.
    """
    mean = sum(requests) / len(requests)
    rates = [rate * number / mean for number in requests]
    # At low rates, samples are longer, so that some requests arrive in each.
    return [
        Hour(
            seconds=_HOUR_S,
            rate=each,
            requests=poisson(
                rate=each, seconds=max(sample_s, 2 / each), seed=seed + index, lengths=lengths
            )
            if each
            else (),
        )
        for index, each in enumerate(rates)
    ]


def plan(
    place: ModelledPlace,
    hours: Sequence[Hour],
    config: CompareConfig,
    *,
    num_devices: int | None = None,
    price: float = 1.0,
    watch: Watch = lambda words: None,
) -> Plan:
    """Plan a trace.

    Args:
        place: A modelled device.
        hours: Hours with requests.
        config: Settings; `seconds` are those of each hour that are simulated.
        num_devices: Number of devices; None: as many as requests alone need.
        price: Price of a device per hour.
        watch: Function that is called with what is being done.

    Raises:
        BudgetError: Requests alone hold the SLOs at no rate.
    """
    bench = Bench(place, config)
    slo = Slo(ttft_s=config.ttft_s, tpot_s=config.tpot_s or DEFAULT_TPOT_STEPS * bench.solo_s())
    everything = [request for hour in hours for request in hour.requests]
    factor = config.length_factor or fitting_factor(everything, place.latency, slo.ttft_s)
    hours = [replace(hour, requests=scale_lengths(hour.requests, factor)) for hour in hours]
    busiest = max(hours, key=lambda hour: hour.rate)
    watch("requests alone in the busiest hour")
    saturation = bench.saturation(busiest.requests, slo)
    number = num_devices or max(1, ceil(busiest.rate / saturation))
    watch(f"{number} devices; jobs alone on one")
    alone = bench.run(JOBS_ALONE, [], slo)[0].tuning_tokens_per_s
    hour_plans = []
    for index, hour in enumerate(hours):
        watch(f"hour {index}: {hour.rate:.3g} requests/s")
        hour_plans.append(_hour_plan(bench, hour, slo, number, alone))
    return Plan(
        place=place.name,
        slo=slo,
        length_factor=factor,
        saturation=saturation,
        num_devices=number,
        hours=hour_plans,
        alone_tokens_per_s=alone,
        price=price,
    )


def _hour_plan(
    bench: Bench, hour: Hour, slo: Slo, num_devices: int, alone_tokens_per_s: float
) -> HourPlan:
    if not hour.requests:
        attainment, tokens_per_s = 1.0, alone_tokens_per_s
    else:
        share = hour.requests[::num_devices]
        sample = rescale(share, rate=hour.rate / num_devices, seconds=bench.config.seconds)
        played, _ = bench.run(DEFAULT_POLICY, sample, slo)
        attainment, tokens_per_s = played.attainment(slo) or 0.0, played.tuning_tokens_per_s
    return HourPlan(
        rate=hour.rate,
        seconds=hour.seconds,
        attainment=attainment,
        tuning_tokens_per_s=num_devices * tokens_per_s,
    )


def short_of_slos(plan: Plan) -> list[int]:
    """Return the hours in which fewer requests than promised hold their SLOs."""
    return [index for index, hour in enumerate(plan.hours) if hour.attainment < ATTAINMENT]
