"""Nodes of this machine beside the same cluster in virtual time: `python -m experiments.cluster
--device here`.

On both sides the same requests arrive at the same times at the same scheduler and placement. The
real side is a `ClusterLink` and nodes with an engine each in a process of its own, without Ray and
HTTP between them. The modelled side is the engine itself on devices by the profile that the real
ones have measured.

What no model can know is measured, and given to it. Three engines may have fewer cores than they
would like, and others use the machine: the profile is fitted to the mean times of the real run's
steps, by their rows, and its noise is the spread of those with prompts. Requests that are alone
show what an engine's process does between two steps, which is part of each modelled step, and the
time of messages between the front and a node.

Of a thousand requests ten are above the p99. So the real nodes may get the requests several times,
modelled ones get them with several seeds of the noise, and each side pools its runs. The difference
between real runs is printed, too.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import exp, log
from random import Random
from statistics import mean, median, pstdev
from typing import Any, NamedTuple

from coserve.bench.places import ModelledPlace
from coserve.cluster.front.link import ClusterLink
from coserve.cluster.nodes.messages import NodeSettings
from coserve.cluster.nodes.node import NodeServer
from coserve.cluster.nodes.profiler import profile_of
from coserve.cluster.placement import make_placement
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.view import ClusterTask
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AddRequest
from coserve.engine.config import EngineConfig
from coserve.errors import ClusterError
from coserve.models.backbone import Backbone
from coserve.protocol.messages import EngineSettings, Ready, StepRecord, StepReport
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.profile import Curve, Profile
from coserve.workloads.summary import percentile
from experiments.cluster_simulation.engine import EngineNode
from experiments.cluster_simulation.simulation import ClusterSimulation

# Requests that are alone, on both sides; the first of them warm the engines up.
_ALONE, _WARM = 54, 6
_READY_S, _TIMEOUT_S = 600.0, 60.0
_MEAN_PROMPT, _MEAN_OUTPUT, _LONGEST = 64, 48, 256
_MAX_NOISE = 1.0
# After the answers of a run, until its last reports have come.
_SETTLE_S = 0.5
# Times that the curve of the forward pass is moved towards what steps took, of which at least as
# many are of a size.
_NUM_FITS, _MIN_STEPS = 4, 10

Watch = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class HereConfig:
    """Settings of the comparison."""

    model: str = "tiny"
    """Model, as `coserve up` takes it."""
    dtype: str = "float32"
    """Dtype of the model."""
    num_nodes: int = 3
    """Number of nodes."""
    rate: float = 12.0
    """Requests per second."""
    num_requests: int = 600
    """Number of requests."""
    num_runs: int = 1
    """Number of times that real nodes get them."""
    num_seeds: int = 5
    """Number of runs in virtual time."""
    placement: str = "round-robin"
    """Name of the placement."""
    memory_bytes: int = 64_000_000
    """Bytes of each node's page pool."""
    seed: int = 0
    """Seed of arrivals and lengths."""


class _Answer(NamedTuple):
    """Times of an answer."""

    arrival_s: float
    """Arrival of the request."""
    first_s: float
    """Seconds from the arrival to the first token."""
    end_s: float
    """Seconds from the arrival to the end."""


class _Ran(NamedTuple):
    """Result of a real run."""

    answers: list[_Answer]
    """Answers to the requests."""
    steps: list[StepRecord]
    """Steps of the engines."""


class _Steps:
    """An `EngineListener` that keeps the steps of engines."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        raise ClusterError("a node has died: its log says more")

    def engine_reported(self, report: StepReport) -> None:
        self.steps += report.steps


class _Fitted(NamedTuple):
    """A profile with the mean times of real steps, for each order of magnitude of rows."""

    profile: Profile
    """The profile."""
    times: float
    """Its times over those of the measured profile."""
    noise: float
    """Standard deviation of the logarithm of the times of steps with prompts; that of others evens
    out over an answer.
    """


def run(
    backbone: Backbone, config: HereConfig, watch: Watch = lambda words: None
) -> dict[str, Any]:
    """Run both sides, and return them and the errors of the modelled one as JSON.

    Args:
        backbone: Model on the "meta" device.
        config: Settings.
        watch: Function that is called with what is being done.
    """
    alone, tasks = make_tasks(config, alone=True), make_tasks(config)
    watch(
        f"{config.num_nodes} nodes of this machine: {config.num_requests} requests at "
        f"{config.rate:g}/s"
    )
    ready, real_alone, real = asyncio.run(_play(config, alone, tasks))
    watch("the same in virtual time")
    assert ready.profile is not None
    pause_s = _pause_s(real_alone.steps)
    fitted = _fit(ready.profile, [step for ran in real for step in ran.steps])
    fitted_alone = _fit(ready.profile, real_alone.steps)
    modelled_alone = _Modelled(backbone, ready, fitted_alone, pause_s, 0.0, config).play(alone, 0)
    messages_s = max(
        0.0, median(_firsts(real_alone.answers[_WARM:])) - median(_firsts(modelled_alone[_WARM:]))
    )
    modelled = _Modelled(backbone, ready, fitted, pause_s, messages_s, config)
    return {
        "messages_ms": round(1e3 * messages_s, 3),
        "profile_times": round(fitted.times, 4),
        "noise": round(fitted.noise, 4),
        "pause_ms": round(1e3 * pause_s, 4),
        **_compared(
            real=[ran.answers for ran in real],
            modelled=[modelled.play(tasks, seed) for seed in range(config.num_seeds)],
            num_tokens=sum(task.num_output_tokens for task in tasks),
        ),
    }


def make_tasks(config: HereConfig, *, alone: bool = False) -> list[ClusterTask]:
    """Return a Poisson process of requests.

    Args:
        config: Settings.
        alone: Whether each request arrives long after the one before.
    """
    random, at_s, result = Random(config.seed), 0.0, []
    for index in range(_ALONE if alone else config.num_requests):
        at_s += 2.0 if alone else random.expovariate(config.rate)
        prompt, output = (
            min(_LONGEST, 1 + round(random.expovariate(1 / m)))
            for m in (_MEAN_PROMPT, _MEAN_OUTPUT)
        )
        result.append(
            ClusterTask(
                id=f"r{index}",
                kind="request",
                arrival_s=at_s,
                num_tokens=prompt,
                num_output_tokens=output,
            )
        )
    return result


# -- for real -----------------------------------------------------------------------------


async def _play(
    config: HereConfig, alone: Sequence[ClusterTask], tasks: Sequence[ClusterTask]
) -> tuple[Ready, _Ran, list[_Ran]]:
    engine = EngineConfig(memory_bytes=config.memory_bytes)
    settings = EngineSettings(
        address="", model=config.model, dtype=config.dtype, device="cpu", threads=1, engine=engine
    )
    nodes = {
        f"node-{number}": NodeServer(NodeSettings(engine=settings, timeout_s=_TIMEOUT_S))
        for number in range(config.num_nodes)
    }

    async def find() -> Mapping[str, NodeServer]:
        return nodes

    link = ClusterLink(find, ClusterScheduler(make_placement(config.placement)))
    running = asyncio.create_task(link.run())
    try:
        until_s = time.monotonic() + _READY_S
        while link.num_nodes < config.num_nodes:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"{link.num_nodes} of {config.num_nodes} nodes are ready in {_READY_S:g} s"
                )
            await asyncio.sleep(0.1)
        ready = link.require_ready()
        heard = _Steps()
        link.listen(heard)

        async def end(answers: Sequence[_Answer], start_s: float = 0.0) -> _Ran:
            await asyncio.sleep(_SETTLE_S)
            steps, heard.steps = heard.steps, []
            return _Ran(
                [answer._replace(arrival_s=answer.arrival_s - start_s) for answer in answers], steps
            )

        # One after the other: how long before the next they come does not matter.
        first = await end([await _answer(link, task, ready, time.monotonic()) for task in alone])
        runs = []
        for _ in range(config.num_runs):
            start_s = time.monotonic()
            answers = await asyncio.gather(
                *(_answer(link, task, ready, start_s + task.arrival_s) for task in tasks)
            )
            runs.append(await end(answers, start_s))
        return ready, first, runs
    finally:
        await link.stop()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.gather(*(node.stop() for node in nodes.values()))


async def _answer(link: ClusterLink, task: ClusterTask, ready: Ready, at_s: float) -> _Answer:
    """Send a request at a time, and return its answer; a late sender counts against the nodes."""
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    id = f"{task.id}-{at_s}"
    request = AddRequest(
        id=id,
        prompt=Random(id).choices(range(ready.vocab_size), k=task.num_tokens),
        params=SamplingParams(max_tokens=task.num_output_tokens, temperature=0.0, ignore_eos=True),
        arrival_s=at_s,
    )
    stream, first_s = link.open([request]), 0.0
    try:
        async for batch in stream.batches():
            if not first_s and any(chunk.tokens for chunk in batch):
                first_s = time.monotonic() - at_s
    finally:
        link.close(stream)
    return _Answer(at_s, first_s, time.monotonic() - at_s)


# -- in virtual time ------------------------------------------------------------------------


def _pause_s(steps: Sequence[StepRecord]) -> float:
    """Return the seconds between two steps of an engine that decodes single requests."""
    pairs = [
        (before, after)
        for before, after in pairwise(steps)
        if before.decode_rows == after.decode_rows == 1
    ]
    return median([max(0.0, after.end_s - after.step_s - before.end_s) for before, after in pairs])


def _fit(profile: Profile, steps: Sequence[StepRecord]) -> _Fitted:
    """Fit a profile to steps of requests."""
    context = _MEAN_PROMPT + _MEAN_OUTPUT // 2
    loads = []
    for step in steps:
        if rows := step.decode_rows + step.prefill_rows:
            spans = step.decode_rows + (step.prefill_rows > 0)
            loads.append(
                (
                    step.step_s,
                    ForwardLoad(rows=rows, sampled=spans, spans=spans, keys=spans * context),
                )
            )
    by_size: dict[int, list[tuple[float, ForwardLoad]]] = {}
    for each in loads:
        by_size.setdefault(each[1].rows.bit_length(), []).append(each)
    seen = {size: each for size, each in by_size.items() if len(each) >= _MIN_STEPS}
    times = _ratio(_beside(profile, loads))
    fitted = _scaled(profile, times)
    # A point of the curve for each size, where its steps are.
    middles = [round(mean([load.rows for _, load in each])) for each in seen.values()]
    points = sorted({*fitted.forward.rows, *middles})
    curve = Curve(rows=tuple(points), seconds=tuple([fitted.forward.at(point) for point in points]))
    for _ in range(_NUM_FITS):
        fitted = replace(fitted, forward=curve)
        ratios = {size: _ratio(_beside(fitted, each)) for size, each in seen.items()}
        pairs = zip(points, curve.seconds, strict=True)
        curve = replace(
            curve, seconds=tuple([s * ratios.get(point.bit_length(), 1.0) for point, s in pairs])
        )
    fitted = replace(fitted, forward=curve)
    prompts = [each for each in loads if each[1].rows > each[1].spans] or loads
    noise = min(
        _MAX_NOISE, pstdev([log(took_s / said_s) for took_s, said_s in _beside(fitted, prompts)])
    )
    return _Fitted(fitted, times, noise)


def _beside(
    profile: Profile, loads: Sequence[tuple[float, ForwardLoad]]
) -> list[tuple[float, float]]:
    """Return the measured and the predicted seconds of steps."""
    latency = LatencyModel(profile)
    return [(took_s, latency.forward_s(load)) for took_s, load in loads]


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(took_s for took_s, _ in pairs) / sum(said_s for _, said_s in pairs)


def _scaled(profile: Profile, times: float) -> Profile:
    """Return the profile of a device on which everything takes this many times as long."""
    changed: dict[str, Any] = {}
    for each in fields(Profile):
        value = getattr(profile, each.name)
        if isinstance(value, Curve):
            changed[each.name] = replace(
                value, seconds=tuple([times * seconds for seconds in value.seconds])
            )
        elif isinstance(value, float):
            changed[each.name] = times * value
    return replace(profile, **changed)


class _Modelled:
    """A cluster in virtual time.

    Args:
        backbone: Model on the "meta" device.
        ready: Report of a real engine at its start.
        fitted: Profile of a node.
        pause_s: Seconds that each forward pass takes in addition.
        messages_s: Seconds from a step's end until the front gets its report.
        config: Settings.
    """

    def __init__(
        self,
        backbone: Backbone,
        ready: Ready,
        fitted: _Fitted,
        pause_s: float,
        messages_s: float,
        config: HereConfig,
    ) -> None:
        # Of a log-normal factor, the mean is above the median.
        profile = _scaled(fitted.profile, exp(-(fitted.noise**2) / 2))
        forward = replace(
            profile.forward,
            seconds=tuple([seconds + pause_s for seconds in profile.forward.seconds]),
        )
        self._place = ModelledPlace(
            name=ready.hardware,
            backbone=backbone,
            profile=replace(profile, forward=forward),
            num_pages=ready.num_pages,
            noise=fitted.noise,
        )
        self._known, self._messages_s, self._config = profile_of(ready), messages_s, config

    def play(self, tasks: Sequence[ClusterTask], seed: int) -> list[_Answer]:
        """Return the answers in virtual time; no two nodes have the same noise."""
        config = self._config
        engine = EngineConfig(memory_bytes=config.memory_bytes)
        places = [
            replace(self._place, seed=config.num_nodes * seed + number)
            for number in range(config.num_nodes)
        ]
        nodes = [
            EngineNode(f"node-{n}", place.open(engine), self._known)
            for n, place in enumerate(places)
        ]
        simulation = ClusterSimulation(
            nodes, make_placement(config.placement), messages_s=self._messages_s
        )
        outcomes, result = simulation.run(tasks).outcomes, []
        for task in tasks:
            outcome = outcomes[task.id]
            assert outcome.end_s is not None
            result.append(
                _Answer(task.arrival_s, outcome.response_s, outcome.end_s - task.arrival_s)
            )
        return result


# -- what it comes to -----------------------------------------------------------------------


def _firsts(answers: Sequence[_Answer]) -> list[float]:
    return [answer.first_s for answer in answers]


def _compared(*, num_tokens: int, **sides: Sequence[Sequence[_Answer]]) -> dict[str, Any]:
    """Return the pooled results of each side's runs, their medians, and the differences.

    Args:
        num_tokens: Output tokens of a run.
        sides: Answers of each run, by side.
    """
    runs = {
        name: [_summary([answers], num_tokens) for answers in side] for name, side in sides.items()
    }
    pooled = {name: _summary(side, num_tokens) for name, side in sides.items()}
    medians = {name: _each(median, summaries) for name, summaries in runs.items()}
    return {
        "rows": [{"nodes": name, **row} for name, row in pooled.items()],
        "error": _beyond(pooled["modelled"], pooled["real"]),
        "median_error": _beyond(medians["modelled"], medians["real"]),
        "spread": {
            name: _beyond(_each(max, summaries), _each(min, summaries))
            for name, summaries in runs.items()
        },
        "runs": runs,
    }


def _summary(runs: Sequence[Sequence[_Answer]], num_tokens: int) -> dict[str, float]:
    answers = [answer for run in runs for answer in run]
    seconds = sum([max(answer.arrival_s + answer.end_s for answer in run) for run in runs])
    ends = [answer.end_s for answer in answers]
    return {
        "requests_per_s": round(len(answers) / seconds, 4),
        "tokens_per_s": round(num_tokens * len(runs) / seconds, 3),
        "ttft_p50_ms": round(1e3 * percentile(_firsts(answers), 0.5), 3),
        "ttft_p99_ms": round(1e3 * percentile(_firsts(answers), 0.99), 3),
        "latency_p50_ms": round(1e3 * percentile(ends, 0.5), 3),
        "latency_p99_ms": round(1e3 * percentile(ends, 0.99), 3),
    }


def _each(
    of: Callable[[list[float]], float], summaries: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    return {name: of([summary[name] for summary in summaries]) for name in summaries[0]}


def _beyond(those: Mapping[str, float], these: Mapping[str, float]) -> dict[str, float]:
    return {name: round(those[name] / value - 1, 4) for name, value in these.items()}
