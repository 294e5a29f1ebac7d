"""HARLI sections 5 and 6: the part of the device that requests need to decode just in time; jobs have the rest.

Before every decode step, and so after every arrival, the partition is chosen anew: the one whose predicted decode
latency comes nearest to the tightest TPOT SLO without passing it. Where none keeps it, or a job has nothing ready, the
whole device is the requests'. Jobs run in units of about 10 ms, of one layer each, so that they give way soon. Where
a decode step is over before a job's smallest piece would be, the job has that once its part of the device was worth it.

The predictor has two stages. Equation 2 says what decoding takes on some units alone, with coefficients for each number
of units, from three representative batches; equation 3 by what factor a job beside it stretches that.

HARLI decodes on instances that have no prefill (section 8.1): here a step with prompts is the requests' alone. `_sides`
says how windows run. A device that cannot be divided runs units after the requests' rows, until the SLO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Partition, Plan, RequestView, View
from coserve.scheduling.policies._sides import add_units, tune_beside
from coserve.scheduling.policies._turns import next_job, serving_step, slo_s
from coserve.scheduling.policies.base import Policy, setting
from coserve.scheduling.profile import Profile
from coserve.scheduling.sharing import Share, between

# Batches and numbers of tokens in the cache at which decode steps are fitted.
BATCHES, CONTEXTS = (4, 16, 64), (256, 1024)


class Solo(NamedTuple):
    """Equation 2, for some units: seconds to decode alone are bs b0 + c0 + bs k0 seqlen."""

    b0: float
    c0: float
    k0: float

    def seconds(self, batch: int, context: float) -> float:
        return batch * self.b0 + self.c0 + batch * self.k0 * context


class Predictor(NamedTuple):
    """Equation 3: beside a job, decoding takes SM_infer b1 + SM_ft k1 times as long, in shares of the device. solo: by
    number of units.
    """

    num_units: int
    solo: dict[int, Solo]
    b1: float
    k1: float

    def seconds(self, partition: Partition, batch: int, context: float) -> float:
        """A decode step of a batch that has as many tokens in the cache in the mean, beside a job."""
        inference, tuning = partition.forward_units / self.num_units, partition.backward_units / self.num_units
        factor = inference * self.b1 + tuning * self.k1
        return factor * self.solo[partition.forward_units].seconds(batch, context)


def predictor(latency: LatencyModel) -> Predictor:
    """Both stages, fitted once to what was measured of a device and of its parts, whatever its steps took since.

    That all of a job takes from decoding grows with its units, from nothing, fixes b1 and k1 for parts that make up the
    whole device.
    """
    found = _PREDICTORS.get(latency)
    if found is None:
        found = _PREDICTORS[latency] = _fitted(latency.profile)
    return found


# By what asks in every step: a profile is long, and takes longer to look up than to predict with.
_PREDICTORS = WeakKeyDictionary[LatencyModel, Predictor]()


def _fitted(profile: Profile) -> Predictor:
    sharing = profile.sharing
    assert sharing is not None, "the device was not measured in parts"
    latency = LatencyModel(profile)
    solo = {share.units: _solo(latency, share) for share in sharing.shares}
    return Predictor(num_units=sharing.num_units, solo=solo, b1=1.0, k1=1.0 + sharing.forward_interference)


def _solo(latency: LatencyModel, share: Share) -> Solo:
    """Seconds are a line in the batch for each context, whose slope is a line in the context."""
    slopes, starts = [], []
    for context in CONTEXTS:
        seconds = [
            latency.decode_s(num_requests=batch, context=context) / between(share.rows, share.forward, batch)
            for batch in BATCHES
        ]
        slope, start = _line(BATCHES, seconds)
        slopes.append(slope)
        starts.append(start)
    k0, b0 = _line(CONTEXTS, slopes)
    return Solo(b0, mean(starts), k0)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope, and value at 0, of the line nearest to some points (least squares)."""
    mean_x, mean_y = mean(xs), mean(ys)
    slope = sum([(x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)])
    slope /= sum([(x - mean_x) ** 2 for x in xs])
    return slope, mean_y - slope * mean_x


@dataclass(frozen=True, kw_only=True)
class Harli(Policy):
    """See the module."""

    summary: ClassVar[str] = "decoding on the part of the device that just keeps the SLO, jobs on the rest (HARLI)"

    unit_ms: float = setting(10.0, "About how long a unit of a job takes, in milliseconds.", least=0.1)

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        memory, build = serving_step(view, latency)
        job = next_job(view, memory)
        if job is None or any(request.num_rows > 1 for request in memory.requests):
            return build.build()
        until_s, unit_s = slo_s(view, memory), self.unit_ms / 1000
        if build.num_rows and view.num_units > 1 and latency.profile.sharing is not None:
            partition = self.partition(memory.requests, until_s, latency)
            if partition is None:
                return build.build()
            return tune_beside(build, job, latency, partition, unit_s=unit_s, until_s=until_s)
        if build.seconds < until_s:
            add_units(build, job, latency, until_s - build.seconds, unit_s=unit_s)
        if build.runs_nothing:  # an idle device makes the smallest step
            build.take(job, 0)
        return build.build()

    def partition(self, requests: Sequence[RequestView], slo_s: float, latency: LatencyModel) -> Partition | None:
        """The one with which decoding comes nearest to the SLO without passing it; None if it passes it with all."""
        predicted, context = predictor(latency), mean([request.num_past for request in requests])
        found, nearest_s = None, 0.0
        for partition in latency.sharing.partitions:
            seconds = predicted.seconds(partition, len(requests), context)
            if nearest_s < seconds <= slo_s:
                found, nearest_s = partition, seconds
        return found
