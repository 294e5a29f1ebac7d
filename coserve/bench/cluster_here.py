"""`coserve bench cluster --device here`: nodes of this machine, and the same cluster in virtual time.

On both sides the same requests come at the same moments to the same scheduler and placement. For real: a `ClusterLink`,
and nodes with an engine each in a process of its own, without Ray and HTTP between them. Modelled: the engine itself on
devices by the profile that the real ones have measured of themselves.

What is no model's to know is measured, and given to it. Three engines may have fewer cores than they would like, and
others use the machine: the profile is fitted to what the steps of the real run took in the mean, by their rows, and its
noise is the spread of those with prompts. Requests that are alone tell what an engine's process does between two steps,
which is part of each modelled step, and what messages between the front and a node take, which is added.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import exp, log
from random import Random
from statistics import mean, median, pstdev
from typing import Any, NamedTuple

from coserve.bench.places import ModelledPlace
from coserve.cluster.link import ClusterLink
from coserve.cluster.messages import NodeSettings
from coserve.cluster.node import Node
from coserve.cluster.placement import make_placement
from coserve.cluster.profiler import profile_of
from coserve.cluster.simulation.engine import EngineNode
from coserve.cluster.simulation.simulation import ClusterSimulation
from coserve.cluster.view import Task
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.errors import ClusterError
from coserve.models.backbone import Backbone
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.profile import Curve, Profile
from coserve.worker.protocol import AddRequest, EngineSettings, Ready, StepRecord, StepReport
from coserve.workloads.summary import percentile

# Requests that are alone, on both sides; the first of them warm the engines up.
_ALONE, _WARM = 54, 6
_READY_S, _TIMEOUT_S = 600.0, 60.0
_MEAN_PROMPT, _MEAN_OUTPUT, _LONGEST = 64, 48, 256
_MOST_NOISE = 1.0
# Times that the curve of the forward pass is moved towards what steps took, of which at least as many are of a size.
_NUM_FITS, _LEAST_STEPS = 4, 10

Watch = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class HereConfig:
    """rate: requests per second. memory_bytes: of each node, for pages."""

    model: str = "tiny"
    dtype: str = "float32"
    num_nodes: int = 3
    rate: float = 12.0
    num_requests: int = 600
    placement: str = "round-robin"
    memory_bytes: int = 64_000_000
    seed: int = 0


class _Answer(NamedTuple):
    """Seconds: of the arrival, and from there to the first token and to the end."""

    arrival_s: float
    first_s: float
    end_s: float


@dataclass
class _Ran:
    """What came of requests, and the steps that engines made for them. An `EngineListener`."""

    answers: list[_Answer] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        raise ClusterError("a node has died: its log says more")

    def engine_reported(self, report: StepReport) -> None:
        self.steps += report.steps


class _Fitted(NamedTuple):
    """A profile by which steps take what real ones took in the mean, of each order of magnitude of rows. times: of what
    it was before, in all. noise: standard deviation of the logarithm of what steps with prompts take beside it: that of
    others evens out over an answer.
    """

    profile: Profile
    times: float
    noise: float


def run(backbone: Backbone, config: HereConfig, watch: Watch = lambda words: None) -> dict[str, Any]:
    """As JSON: both sides and what the modelled one errs by. backbone: the model on the "meta" device."""
    alone, tasks = make_tasks(config, alone=True), make_tasks(config)
    watch(f"{config.num_nodes} nodes of this machine: {config.num_requests} requests at {config.rate:g}/s")
    ready, real_alone, real = asyncio.run(_play(config, alone, tasks))
    watch("the same in virtual time")
    assert ready.profile is not None
    pause_s = _pause_s(real_alone.steps)
    fitted = _fit(ready.profile, real.steps)
    modelled_alone = _model(backbone, ready, _fit(ready.profile, real_alone.steps), pause_s, config, alone)
    messages_s = max(0.0, median(_firsts(real_alone.answers[_WARM:])) - median(_firsts(modelled_alone[_WARM:])))
    modelled = [
        answer._replace(first_s=answer.first_s + messages_s, end_s=answer.end_s + messages_s)
        for answer in _model(backbone, ready, fitted, pause_s, config, tasks)
    ]
    sides = {"real": _summary(real.answers, tasks), "modelled": _summary(modelled, tasks)}
    return {
        "messages_ms": round(1e3 * messages_s, 3),
        "profile_times": round(fitted.times, 4),
        "noise": round(fitted.noise, 4),
        "pause_ms": round(1e3 * pause_s, 4),
        "rows": [{"nodes": name, **side} for name, side in sides.items()],
        "error": {key: round(sides["modelled"][key] / value - 1, 4) for key, value in sides["real"].items()},
    }


def make_tasks(config: HereConfig, *, alone: bool = False) -> list[Task]:
    """A Poisson process of requests; alone: each long after the one before."""
    random, at_s, found = Random(config.seed), 0.0, []
    for index in range(_ALONE if alone else config.num_requests):
        at_s += 2.0 if alone else random.expovariate(config.rate)
        prompt, output = (min(_LONGEST, 1 + round(random.expovariate(1 / m))) for m in (_MEAN_PROMPT, _MEAN_OUTPUT))
        found.append(Task(id=f"r{index}", kind="request", arrival_s=at_s, num_tokens=prompt, num_output_tokens=output))
    return found


# -- for real -----------------------------------------------------------------------------


async def _play(config: HereConfig, alone: Sequence[Task], tasks: Sequence[Task]) -> tuple[Ready, _Ran, _Ran]:
    engine = EngineConfig(memory_bytes=config.memory_bytes)
    settings = EngineSettings(
        address="", model=config.model, dtype=config.dtype, device="cpu", threads=1, engine=engine
    )
    nodes = {
        f"node-{number}": Node(NodeSettings(engine=settings, timeout_s=_TIMEOUT_S))
        for number in range(config.num_nodes)
    }

    async def find() -> Mapping[str, Node]:
        return nodes

    link = ClusterLink(find, make_placement(config.placement))
    running = asyncio.create_task(link.run())
    try:
        until_s = time.monotonic() + _READY_S
        while link.num_nodes < config.num_nodes:
            if time.monotonic() > until_s:
                raise ClusterError(f"{link.num_nodes} of {config.num_nodes} nodes are ready in {_READY_S:g} s")
            await asyncio.sleep(0.1)
        ready = link.require_ready()
        first, second = _Ran(), _Ran()
        link.listen(first)
        # One after the other: how long before the next they come does not matter.
        first.answers = [await _answer(link, task, ready, time.monotonic()) for task in alone]
        link.listen(second)
        start_s = time.monotonic()
        answers = await asyncio.gather(*(_answer(link, task, ready, start_s + task.arrival_s) for task in tasks))
        second.answers = [answer._replace(arrival_s=answer.arrival_s - start_s) for answer in answers]
        first.steps = first.steps[: len(first.steps) - len(second.steps)]
        return ready, first, second
    finally:
        await link.stop()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.gather(*(node.stop() for node in nodes.values()))


async def _answer(link: ClusterLink, task: Task, ready: Ready, at_s: float) -> _Answer:
    """At a moment; a sender that is late counts against the nodes."""
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    request = AddRequest(
        id=f"{task.id}-{at_s}",
        prompt=Random(task.id).choices(range(ready.vocab_size), k=task.num_tokens),
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
    """Between two steps of an engine that decodes one request after the other."""
    pairs = [(before, after) for before, after in pairwise(steps) if before.decode_rows == after.decode_rows == 1]
    return median([max(0.0, after.end_s - after.step_s - before.end_s) for before, after in pairs])


def _fit(profile: Profile, steps: Sequence[StepRecord]) -> _Fitted:
    """To steps of requests."""
    context = _MEAN_PROMPT + _MEAN_OUTPUT // 2
    loads = []
    for step in steps:
        if rows := step.decode_rows + step.prefill_rows:
            spans = step.decode_rows + (step.prefill_rows > 0)
            loads.append((step.step_s, ForwardLoad(rows=rows, sampled=spans, spans=spans, keys=spans * context)))
    by_size: dict[int, list[tuple[float, ForwardLoad]]] = {}
    for each in loads:
        by_size.setdefault(each[1].rows.bit_length(), []).append(each)
    seen = {size: each for size, each in by_size.items() if len(each) >= _LEAST_STEPS}
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
        curve = replace(curve, seconds=tuple([s * ratios.get(point.bit_length(), 1.0) for point, s in pairs]))
    fitted = replace(fitted, forward=curve)
    prompts = [each for each in loads if each[1].rows > each[1].spans] or loads
    noise = min(_MOST_NOISE, pstdev([log(took_s / said_s) for took_s, said_s in _beside(fitted, prompts)]))
    return _Fitted(fitted, times, noise)


def _beside(profile: Profile, loads: Sequence[tuple[float, ForwardLoad]]) -> list[tuple[float, float]]:
    """What steps took, and what a profile says of them."""
    latency = LatencyModel(profile)
    return [(took_s, latency.forward_s(load)) for took_s, load in loads]


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(took_s for took_s, _ in pairs) / sum(said_s for _, said_s in pairs)


def _scaled(profile: Profile, times: float) -> Profile:
    """A device on which everything takes this many times as long."""
    changed: dict[str, Any] = {}
    for each in fields(Profile):
        value = getattr(profile, each.name)
        if isinstance(value, Curve):
            changed[each.name] = replace(value, seconds=tuple([times * seconds for seconds in value.seconds]))
        elif isinstance(value, float):
            changed[each.name] = times * value
    return replace(profile, **changed)


def _model(
    backbone: Backbone, ready: Ready, fitted: _Fitted, pause_s: float, config: HereConfig, tasks: Sequence[Task]
) -> list[_Answer]:
    """pause_s: that each forward pass takes more. Of a log-normal factor, the mean is above the median."""
    profile = _scaled(fitted.profile, exp(-(fitted.noise**2) / 2))
    forward = replace(profile.forward, seconds=tuple([seconds + pause_s for seconds in profile.forward.seconds]))
    place = ModelledPlace(
        name=ready.hardware,
        backbone=backbone,
        profile=replace(profile, forward=forward),
        num_pages=ready.num_pages,
        noise=fitted.noise,
    )
    engine, known = EngineConfig(memory_bytes=config.memory_bytes), profile_of(ready)
    nodes = [EngineNode(f"node-{number}", place.open(engine), known) for number in range(config.num_nodes)]
    ran = ClusterSimulation(nodes, make_placement(config.placement)).run(tasks)
    found = []
    for task in tasks:
        outcome = ran.outcomes[task.id]
        assert outcome.first_token_s is not None and outcome.end_s is not None
        found.append(_Answer(task.arrival_s, outcome.response_s, outcome.end_s - task.arrival_s))
    return found


# -- what it comes to -----------------------------------------------------------------------


def _firsts(answers: Sequence[_Answer]) -> list[float]:
    return [answer.first_s for answer in answers]


def _summary(answers: Sequence[_Answer], tasks: Sequence[Task]) -> dict[str, float]:
    seconds = max(answer.arrival_s + answer.end_s for answer in answers)
    ends = [answer.end_s for answer in answers]
    return {
        "requests_per_s": round(len(answers) / seconds, 4),
        "tokens_per_s": round(sum(task.num_output_tokens for task in tasks) / seconds, 3),
        "ttft_p50_ms": round(1e3 * percentile(_firsts(answers), 0.5), 3),
        "ttft_p99_ms": round(1e3 * percentile(_firsts(answers), 0.99), 3),
        "latency_p50_ms": round(1e3 * percentile(ends, 0.5), 3),
        "latency_p99_ms": round(1e3 * percentile(ends, 0.99), 3),
    }
