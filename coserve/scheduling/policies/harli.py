"""HARLI's scheduler (sections 5 and 6): requests decode just in time on a part of the device, jobs
have the rest.

Before every decode step, and so after every arrival, the partition is chosen anew: the one whose
predicted decode latency comes nearest to the tightest TPOT SLO without passing it. Where none keeps
it, or a job has nothing ready, the whole device is the requests'. So it is after a step in which
weights of another model, which a job trains, had not come yet: there one unit of the job goes
before the requests' rows, if the weights are there by then, and the device is divided again. Jobs
run in units of about 10 ms, of one layer each, so that they give way soon. Where a decode step is
over before a job's smallest piece would be, the job has that once its part of the device was worth
it.

The predictor has two stages. Equation 2 predicts the time of decoding on some units alone, with
coefficients for each number of units, from three representative batches; equation 3 predicts by
what factor a job beside it stretches that. Small batches take as long as one another (section 5.1:
up to four, by padding); up to how many requests that is so, is fitted for each number of units,
since a CPU's tiles have sixteen rows and other CPUs have none.

HARLI decodes on instances that have no prefill (section 8.1): here a step with prompts is the
requests' alone. `_sides` describes how windows run. A device that cannot be divided runs units
after the requests' rows, until the SLO.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from coserve.scheduling.history import History, StepView
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Partition, Plan, RequestProgress, View
from coserve.scheduling.policies._sides import add_units, tune_beside
from coserve.scheduling.policies._turns import next_job, serving_step, slo_s
from coserve.scheduling.policies.base import Policy, setting
from coserve.scheduling.profile import Profile
from coserve.scheduling.sharing import Share, between

# The largest batch and the numbers of tokens in the cache at which decode steps are fitted.
MAX_BATCH, CONTEXTS = 64, (256, 1024)
# Sizes up to which batches may take as long as one request, and by which share longer they may take
# for that.
_PADDED, _AS_LONG = (2, 4, 8, 16), 0.05


class Solo(NamedTuple):
    """Equation 2 for some units: decoding alone takes bs b0 + c0 + bs k0 seqlen seconds."""

    b0: float
    """Seconds per request."""
    c0: float
    """Seconds of a step."""
    k0: float
    """Seconds per token in the cache."""
    padded: int
    """Batch size that smaller batches take as long as, apart from their keys."""

    def seconds(self, batch: int, context: float) -> float:
        return max(batch, self.padded) * self.b0 + self.c0 + batch * self.k0 * context


class Predictor(NamedTuple):
    """Equation 3: beside a job, decoding takes SM_infer b1 + SM_ft k1 times as long, in shares of
    the device.
    """

    num_units: int
    """Units of the device."""
    solo: dict[int, Solo]
    """Equation 2 by number of units."""
    b1: float
    """Factor of the share of requests."""
    k1: float
    """Factor of the share of the job."""

    def seconds(self, partition: Partition, batch: int, context: float) -> float:
        """Return the seconds of a decode step of a batch with this mean number of tokens in the
        cache, beside a job.
        """
        inference, tuning = (
            partition.forward_units / self.num_units,
            partition.backward_units / self.num_units,
        )
        factor = inference * self.b1 + tuning * self.k1
        return factor * self.solo[partition.forward_units].seconds(batch, context)


def predictor(latency: LatencyModel) -> Predictor:
    """Return the predictor, fitted once to the measurements of a device and of its parts, whatever
    its steps took since.

    That the time which a job takes from decoding grows with its units, from nothing, fixes b1 and
    k1 for parts that make up the whole device.
    """
    fitted = _PREDICTORS.get(latency)
    if fitted is None or fitted[0] is not latency.profile:
        fitted = _PREDICTORS[latency] = latency.profile, _fitted(latency.profile)
    return fitted[1]


# By latency model: a profile is long, and takes longer to look up than to predict with.
_PREDICTORS = WeakKeyDictionary[LatencyModel, tuple[Profile, Predictor]]()


def _fitted(profile: Profile) -> Predictor:
    sharing = profile.sharing
    assert sharing is not None, "the device was not measured in parts"
    latency = LatencyModel(profile)
    solo = {share.units: _solo(latency, share) for share in sharing.shares}
    return Predictor(
        num_units=sharing.num_units, solo=solo, b1=1.0, k1=1.0 + sharing.forward_interference
    )


def _solo(latency: LatencyModel, share: Share) -> Solo:
    """Fit equation 2: seconds are a line in the batch for each context, whose slope is a line in
    the context.
    """

    def seconds(batch: int, context: int) -> float:
        return latency.decode_s(num_requests=batch, context=context) / between(
            share.rows, share.forward, batch
        )

    as_long = (1 + _AS_LONG) * seconds(1, 0)
    padded = max([1, *[batch for batch in _PADDED if seconds(batch, 0) <= as_long]])
    batches = (padded, round((padded * MAX_BATCH) ** 0.5), MAX_BATCH)
    lines = [_line(batches, [seconds(batch, context) for batch in batches]) for context in CONTEXTS]
    (near, near_start), (far, far_start) = lines
    k0 = (far - near) / (CONTEXTS[1] - CONTEXTS[0])
    return Solo(near - k0 * CONTEXTS[0], (near_start + far_start) / 2, k0, padded)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the slope, and the value at 0, of the line nearest to some points above 0, by relative
    error (weighted least squares): a decode step's error counts by its length.
    """
    weights = [1 / y**2 for y in ys]
    mean_x, mean_y = (sum(map(mul, weights, each)) / sum(weights) for each in (xs, ys))
    slope = sum(
        [weight * (x - mean_x) * (y - mean_y) for weight, x, y in zip(weights, xs, ys, strict=True)]
    )
    slope /= sum([weight * (x - mean_x) ** 2 for weight, x in zip(weights, xs, strict=True)])
    return slope, mean_y - slope * mean_x


@dataclass
class _Starving(History):
    """A record of the jobs whose weights had not come in the last step."""

    jobs: frozenset[str] = field(default_factory=frozenset)
    """Jobs whose planned tasklets did not begin."""

    def add(self, step: StepView) -> None:
        planned = [part.job for part in step.plan.tasklets]
        self.jobs = frozenset([job for job in planned if not step.num_tasklets.get(job)])


@dataclass(frozen=True, kw_only=True)
class Harli(Policy):
    """HARLI's scheduler: decoding on the part of the device that just keeps the SLO, jobs on the
    rest.
    """

    summary: ClassVar[str] = (
        "decoding on the part of the device that just keeps the SLO, jobs on the rest (HARLI)"
    )

    unit_ms: float = setting(
        10.0, "Approximate time of a unit of a job, in milliseconds.", least=0.1
    )

    def make_history(self) -> History:
        return _Starving()

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        history: _Starving = view.history or _Starving()
        memory, build = serving_step(view, latency)
        job = next_job(view, memory)
        if job is None or [request for request in memory.requests if request.num_rows > 1]:
            return build.build()
        until_s, unit_s = slo_s(view, memory), self.unit_ms / 1000
        if build.num_rows and view.num_units > 1 and latency.profile.sharing is not None:
            partition = self.partition(memory.requests, until_s, latency)
            if partition is None:
                return build.build()
            if job.id in history.jobs:
                add_units(build, job, latency, min(unit_s, until_s - build.seconds), unit_s=unit_s)
                return build.build()
            return tune_beside(build, job, latency, partition, unit_s=unit_s, until_s=until_s)
        if build.seconds < until_s:
            add_units(build, job, latency, until_s - build.seconds, unit_s=unit_s)
        if build.runs_nothing:  # an idle device makes the smallest step
            build.take(job, 0)
        return build.build()

    def partition(
        self, requests: Sequence[RequestProgress], slo_s: float, latency: LatencyModel
    ) -> Partition | None:
        """Return the partition on which decoding comes nearest to the SLO without passing it; None
        if it passes it on all.
        """
        predicted = predictor(latency)
        context = sum([request.num_past for request in requests]) / len(requests)
        nearest, nearest_s = None, 0.0
        for partition in latency.sharing.partitions:
            seconds = predicted.seconds(partition, len(requests), context)
            if nearest_s < seconds <= slo_s:
                nearest, nearest_s = partition, seconds
        return nearest
