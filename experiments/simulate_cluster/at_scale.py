"""A cluster of hundreds of modelled devices through a day: requests of a trace, and jobs as
fine-tuning load.

LeMix's three levels (section V-C): a load balancer gives requests and jobs to cells in turns; in
each cell the scheduler of real nodes places them on its nodes; each node serves and trains by the
coarse model of an engine (`experiments.cluster_simulation.fluid`). Cells are independent, and run
in several processes.

The error of the coarse model is measured first: the engine itself on modelled devices, and the
coarse model, with the same requests and jobs.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import mean
from typing import Any, NamedTuple

from coserve.bench.places import ModelledPlace
from coserve.cluster.nodes.profiler import node_profile, node_profile_path, with_stored_limits
from coserve.cluster.placement import make_placement
from coserve.cluster.view import ClusterTask, NodeProfile
from coserve.engine.config import EngineConfig
from coserve.errors import DataError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import default_tpot_s
from coserve.workloads.summary import percentile
from coserve.workloads.traces import TracedJob, TracedRequest
from experiments.cluster_simulation.engine import EngineNode
from experiments.cluster_simulation.fluid import FluidNode
from experiments.cluster_simulation.node import ModelledNode
from experiments.cluster_simulation.simulation import ClusterSimulation, TaskOutcome
from experiments.worker_processes import worker_processes

# Of the comparison of the two models of a node: nodes, seconds, requests per second of each.
_CHECK_NODES, _CHECK_S, _CHECK_RATES = 2, 60.0, (0.5, 2.0)
_BLOCK_TOKENS = 16

Watch = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """Settings of the simulation."""

    num_nodes: int
    """Number of nodes."""
    rate: float
    """Requests per second over the cluster."""
    seconds: float = 86400.0
    """Length of the day."""
    cell_nodes: int = 8
    """Nodes that one scheduler places on."""
    placement: str = "slack-affinity"
    """Name of the placement."""
    ttft_s: float = 2.0
    """SLO: seconds to the first token."""
    seed: int = 0
    """Seed."""
    workers: int = 2
    """Number of processes."""

    @property
    def num_cells(self) -> int:
        return max(1, self.num_nodes // self.cell_nodes)


class _Kind(NamedTuple):
    """Facts that all nodes of the cluster share."""

    hardware: str
    """Name of the device."""
    profile: Profile
    """Profile of the model on it."""
    node: NodeProfile
    """Profile of a node."""
    num_pages: int
    """Pages of the pool."""
    tpot_s: float
    """SLO: mean seconds per later token."""


class _Cell(NamedTuple):
    """Result of a cell."""

    num_requests: int
    """Number of requests."""
    num_attained: int
    """Number of requests that held both SLOs."""
    ttfts_s: array  # type: ignore[type-arg]  # of floats
    """Seconds to the first token of each answer, as floats."""
    busy_s: float
    """Seconds of work of all nodes."""
    tokens_trained: float
    """Tokens trained."""
    num_jobs: int
    """Number of jobs."""
    num_jobs_ended: int
    """Number of jobs that ended."""
    scheduling_s: float
    """Real processor seconds of the scheduler."""


def run(
    place: ModelledPlace,
    trace: Sequence[TracedRequest],
    jobs: Sequence[TracedJob],
    config: ScaleConfig,
    watch: Watch = lambda words: None,
) -> dict[str, Any]:
    """Simulate the cluster, and return the result as JSON.

    Args:
        place: A modelled device.
        trace: Requests.
        jobs: Jobs, with times from the day's start; each is a task for each of its GPUs, as long on
            a whole device of this kind as it took there.
        config: Settings.
        watch: Function that is called with what is being done.
    """
    kind = _kind(place)
    watch(f"the coarse model of a node beside the engine: {_CHECK_S:g} s on {_CHECK_NODES} nodes")
    errors = [_check(place, kind, trace, rate, config) for rate in _CHECK_RATES]
    watch(f"{config.num_cells} cells of {config.cell_nodes} nodes, {config.seconds / 3600:g} h")
    cells: list[_Cell] = []
    given = (kind, list(trace), list(jobs), config)
    with worker_processes(config.workers, _begin, given) as pool:
        for cell in pool.map(_run_cell, range(config.num_cells)):
            cells.append(cell)
            if len(cells) % 25 == 0:
                watch(f"{len(cells)} of {config.num_cells} cells")
    return {**_summary(cells, config), "coarse_errors": errors}


def requests_of_cell(
    trace: Sequence[TracedRequest], *, rate: float, seconds: float, cell: int, num_cells: int
) -> list[TracedRequest]:
    """Return the requests that a load balancer gives to a cell in turns.

    The trace is stretched to the rate, and played again from its start when it is over.
    """
    number = round(rate * seconds)
    span_s = (trace[-1].at_s - trace[0].at_s) * len(trace) / max(1, len(trace) - 1) or 1.0
    factor = len(trace) / rate / span_s
    result = []
    for index in range(cell, number, num_cells):
        turn, place = divmod(index, len(trace))
        request = trace[place]
        result.append(
            TracedRequest(
                at_s=(turn * span_s + request.at_s - trace[0].at_s) * factor,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
            )
        )
    return result


def jobs_of_day(jobs: Sequence[TracedJob], seconds: float) -> list[TracedJob]:
    """Return the jobs that are submitted in the period that begins with the median job."""
    if not jobs:
        raise DataError("there are no jobs")
    start_s = sorted(job.at_s for job in jobs)[len(jobs) // 2]
    return [
        job._replace(at_s=job.at_s - start_s)
        for job in jobs
        if start_s <= job.at_s < start_s + seconds
    ]


# -- a cell, in a process of its own -----------------------------------------------------

_given: list[tuple[_Kind, list[TracedRequest], list[TracedJob], ScaleConfig]] = []


def _begin(
    kind: _Kind, trace: list[TracedRequest], jobs: list[TracedJob], config: ScaleConfig
) -> None:
    """Keep what all cells of a process share."""
    _given[:] = [(kind, trace, jobs, config)]


def _run_cell(cell: int) -> _Cell:
    ((kind, trace, jobs, config),) = _given
    latency = LatencyModel(kind.profile)
    nodes = [
        _fluid(f"{cell}-{index}", kind, latency, config.ttft_s)
        for index in range(config.cell_nodes)
    ]
    requests = requests_of_cell(
        trace, rate=config.rate, seconds=config.seconds, cell=cell, num_cells=config.num_cells
    )
    tasks = _tasks(requests, config.ttft_s, kind.tpot_s)
    pieces = [(job, gpu) for job in jobs for gpu in range(job.num_gpus)][cell :: config.num_cells]
    trained_token_s = nodes[0].trained_token_s
    tasks += [
        ClusterTask(
            id=f"job-{index}",
            kind="training",
            arrival_s=job.at_s,
            num_tokens=max(1, round(job.duration_s / trained_token_s)),
        )
        for index, (job, _) in enumerate(pieces)
    ]
    simulation = ClusterSimulation(nodes, make_placement(config.placement))
    ran = simulation.run(tasks, until_s=config.seconds)
    answered = [one for one in ran.requests if isfinite(one.response_s)]
    return _Cell(
        num_requests=len(requests),
        num_attained=sum(_attained(one) for one in answered),
        ttfts_s=array("f", [one.response_s for one in answered]),
        busy_s=sum(ran.busy_s.values()),
        tokens_trained=sum(node.num_tokens_trained for node in nodes),
        num_jobs=len(pieces),
        num_jobs_ended=sum(
            one.task.trains and one.end_s is not None for one in ran.outcomes.values()
        ),
        scheduling_s=ran.scheduling_s,
    )


def _attained(outcome: TaskOutcome) -> bool:
    """Return whether both SLOs were held, or the first one if the request still runs."""
    task = outcome.task
    assert task.ttft_s is not None and task.tpot_s is not None
    tpot_s = _tpot_s(outcome)
    return outcome.response_s <= task.ttft_s and (tpot_s is None or tpot_s <= 1.01 * task.tpot_s)


def _tpot_s(outcome: TaskOutcome) -> float | None:
    if outcome.end_s is None or outcome.first_token_s is None or outcome.task.num_output_tokens < 2:
        return None
    return (outcome.end_s - outcome.first_token_s) / (outcome.task.num_output_tokens - 1)


def _tasks(requests: Sequence[TracedRequest], ttft_s: float, tpot_s: float) -> list[ClusterTask]:
    return [
        ClusterTask(
            id=f"request-{index}",
            kind="request",
            arrival_s=request.at_s,
            num_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )
        for index, request in enumerate(requests)
    ]


def _summary(cells: Sequence[_Cell], config: ScaleConfig) -> dict[str, Any]:
    ttfts_s = [value for cell in cells for value in cell.ttfts_s]
    requests, nodes = sum(cell.num_requests for cell in cells), config.num_cells * config.cell_nodes
    return {
        "nodes": nodes,
        "cells": config.num_cells,
        "placement": config.placement,
        "seconds": config.seconds,
        "requests": requests,
        "requests_per_s": round(requests / config.seconds, 3),
        "attainment": round(sum(cell.num_attained for cell in cells) / max(1, len(ttfts_s)), 5),
        "ttft_p50_ms": round(1e3 * percentile(ttfts_s, 0.5), 2),
        "ttft_p99_ms": round(1e3 * percentile(ttfts_s, 0.99), 2),
        "utilisation": round(sum(cell.busy_s for cell in cells) / (nodes * config.seconds), 4),
        "tokens_trained_per_s": round(
            sum(cell.tokens_trained for cell in cells) / config.seconds, 1
        ),
        "jobs": sum(cell.num_jobs for cell in cells),
        "jobs_ended": sum(cell.num_jobs_ended for cell in cells),
        "scheduling_ms": round(
            1e3 * sum(cell.scheduling_s for cell in cells) / max(1, requests), 4
        ),
    }


# -- nodes, and what the coarse ones err by ------------------------------------------------


def _kind(place: ModelledPlace) -> _Kind:
    profile, backbone = place.profile, place.backbone
    page_bytes = kv_page_bytes(backbone, _BLOCK_TOKENS)
    dtype = str(backbone.dtype).removeprefix("torch.")
    path = node_profile_path(place.name, backbone.name, dtype, page_bytes * place.num_pages)
    measured = node_profile(
        profile,
        block_tokens=_BLOCK_TOKENS,
        page_bytes=page_bytes,
        num_pages=place.num_pages,
        training_yields=True,
    )
    return _Kind(
        hardware=place.name,
        profile=profile,
        node=with_stored_limits(path, measured),
        num_pages=place.num_pages,
        tpot_s=default_tpot_s(LatencyModel(profile)),
    )


def _fluid(name: str, kind: _Kind, latency: LatencyModel, ttft_s: float) -> FluidNode:
    return FluidNode(
        name,
        kind.node,
        latency,
        hardware=kind.hardware,
        num_pages=kind.num_pages,
        ttft_s=ttft_s,
        tpot_s=kind.tpot_s,
    )


def _check(
    place: ModelledPlace,
    kind: _Kind,
    trace: Sequence[TracedRequest],
    rate: float,
    config: ScaleConfig,
) -> dict[str, Any]:
    """Return the results of the engine and of the coarse model with the same requests, and a job on
    each node that does not end.
    """
    requests = requests_of_cell(
        trace, rate=rate * _CHECK_NODES, seconds=_CHECK_S, cell=0, num_cells=1
    )
    tasks = _tasks(requests, config.ttft_s, kind.tpot_s)
    latency = LatencyModel(kind.profile)
    coarse = [_fluid(f"n{index}", kind, latency, config.ttft_s) for index in range(_CHECK_NODES)]
    tokens = round(4 * _CHECK_S / coarse[0].trained_token_s)
    tasks += [
        ClusterTask(id=f"job-{i}", kind="training", arrival_s=0.0, num_tokens=tokens)
        for i in range(_CHECK_NODES)
    ]
    engine = EngineConfig(ttft_s=config.ttft_s)
    places = [replace(place, seed=index) for index in range(_CHECK_NODES)]
    fine = [
        EngineNode(f"n{index}", each.open(engine), kind.node) for index, each in enumerate(places)
    ]
    result: dict[str, Any] = {"requests_per_s_per_node": rate, "requests": len(requests)}
    sides: dict[str, dict[str, float]] = {}
    models: dict[str, Sequence[ModelledNode]] = {"fine": fine, "coarse": coarse}
    for name, nodes in models.items():
        sides[name] = _measured(nodes, tasks, config.placement)
        result[name] = {key: round(value, 5) for key, value in sides[name].items()}
    result["error"] = {
        key: round(sides["coarse"][key] / value - 1, 4)
        for key, value in sides["fine"].items()
        if value > 0
    }
    return result


def _measured(
    nodes: Sequence[ModelledNode], tasks: Sequence[ClusterTask], placement: str
) -> dict[str, float]:
    ran = ClusterSimulation(nodes, make_placement(placement)).run(tasks, until_s=_CHECK_S)
    answered = [one for one in ran.requests if isfinite(one.response_s)]
    tpots_s = [tpot_s for one in answered if (tpot_s := _tpot_s(one)) is not None]
    trained = sum(
        node.engine.jobs.num_tokens_trained
        if isinstance(node, EngineNode)
        else node.num_tokens_trained
        for node in nodes
        if isinstance(node, EngineNode | FluidNode)
    )
    return {
        "requests_ended_per_s": sum(one.end_s is not None for one in ran.requests) / _CHECK_S,
        "ttft_mean_s": mean([one.response_s for one in answered]) if answered else 0.0,
        "ttft_p99_s": percentile([one.response_s for one in answered], 0.99) if answered else 0.0,
        "tpot_mean_s": mean(tpots_s) if tpots_s else 0.0,
        "tokens_trained_per_s": trained / _CHECK_S,
    }
