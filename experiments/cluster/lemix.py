"""Placements on modelled clusters at LeMix's settings (arXiv 2507.21276, section VI): `python -m
experiments.cluster`.

Four nodes of two GPUs each hold a model in two stages. Requests are forward passes, training tasks
forward and backward passes of one sample; both arrive as one Poisson process, of which a share
trains. The time of a pass is the paper's: table II for a sample of the mean squared length, and by
the square of the length (section IV-A). Lengths are log-normal with the mean and the second moment
of HH-RLHF's harmless part (its test file, four characters a token, cut at 1,024). A request's SLO
is a response within five forward passes.

Under `separate` and `separate-dynamic` one model is trained, which the nodes for requests load
after every 100 training tasks; loading is a copy of the weights to a host and one from it, in which
a node does nothing else. Under the others each node trains a model of its own (section V-B).

The paper's pipelines are asynchronous: a training task arrives when the one before has passed the
first stage (section III), and its passes overlap with those of others (section II-C, algorithm 1).
Nodes here run in this way, unless `training_in_flight` bounds it: with 1, each task trains on the
weights that the one before has made.

A request is not a batch (C is 1): the paper gives no C, and by section IV-A a pass takes as many
times longer as there are sequences in it, so that a batch gains nothing. Nor does it give κ, T_max
or the memory of a token: nodes have enough of it.

A request's loss is that of a model which has been trained on as many samples as the one that
answers, on a measured curve (`experiments.cluster.loss_curve`). The paper's losses are of other
models and data: compare placements only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import log, sqrt
from random import Random
from statistics import mean
from typing import Any

from coserve.cluster.placement import make_placement
from coserve.cluster.placement.separate import split
from coserve.cluster.view import ClusterTask, Latency, NodeProfile, TaskKind
from coserve.simulate.hardware import A100, ADA6000, Hardware
from experiments.cluster.loss_curve import loss_after
from experiments.cluster_simulation.pipeline import PipelineNode
from experiments.cluster_simulation.simulation import (
    ClusterSimulation,
    SimulationResult,
    TaskOutcome,
)

OURS = "slack-affinity"
PLACEMENTS = ("lemix", "separate", "separate-dynamic", "round-robin", "lowest-utilisation", OURS)
# What the paper reports of LeMix over separate nodes, at the most.
PAPER_THROUGHPUT, PAPER_ATTAINMENT = 3.53, 2.12
# How busy nodes are with Llama-8B and LMSYS's requests (sections I and II-B). LeMix: "around 22%"
# above NaiveMix.
PAPER_UTILISATION = {
    "separate, 2-2": {"serving": 0.1362, "training": 0.2916},
    "separate, 1-3": {"serving": 0.1428, "training": 0.2778},
    "separate-dynamic": 0.2643,
    "round-robin": 0.3188,
    "lemix": 0.54,
}
NUM_NODES, NUM_STAGES = 4, 2
_MEAN_LENGTH, _SECOND_MOMENT, _LONGEST = 163.0, 1.70, 1024  # the second over the square of the mean
_SLO_TIMES, _SYNC_TASKS = 5.0, 100
# At which LeMix and ours are compared; loads as shares of what the nodes could do if none ever
# stood idle.
EQUAL_ATTAINMENT = 0.85
_LOADS = (0.3, 0.45, 0.6, 0.75, 0.9, 1.05, 1.2, 1.5)
# The paper's figure for what scheduling may take, at this rate.
SCHEDULING_RATE = 150.0
# With one the nodes can do all of it; with the other a sixteenth, so that hundreds of tasks wait.
CALM_MODEL, OVERLOADED_MODEL = "gpt-400m", "llama-70b"

Watch = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LemixModel:
    """A model of the paper's table II."""

    forward_s: float
    """Seconds of a forward pass on a node."""
    backward_s: float
    """Seconds of a backward pass on a node."""
    weight_bytes: float
    """Bytes of the weights."""
    hardware: Hardware
    """GPU of the nodes."""

    @property
    def slo_s(self) -> float:
        return _SLO_TIMES * self.forward_s

    def profile(self) -> NodeProfile:
        """Return the profile of a node: times by the square of the length, in each of the stages
        (section IV-A).
        """
        pairs = NUM_STAGES * _SECOND_MOMENT * _MEAN_LENGTH**2
        return NodeProfile(
            forward=Latency(s_per_pair=self.forward_s / pairs),
            backward=Latency(s_per_pair=self.backward_s / pairs),
        )

    def capacity(self, training_share: float) -> float:
        """Return the tasks per second of nodes that are never idle."""
        return NUM_NODES * NUM_STAGES / (self.forward_s + training_share * self.backward_s)

    @property
    def sync_s(self) -> float:
        """Return the seconds to load trained weights on another node: to the host and back, half on
        each GPU.
        """
        return 2 * self.weight_bytes / NUM_STAGES / self.hardware.host_bytes_per_s


# RTX 6000 Ada is what the paper calls A6000 (section VI-A).
MODELS = {
    "gpt-400m": LemixModel(forward_s=0.03, backward_s=0.04, weight_bytes=1.0e9, hardware=ADA6000),
    "gpt-1.4b": LemixModel(forward_s=0.08, backward_s=0.09, weight_bytes=2.3e9, hardware=ADA6000),
    "gpt-2.5b": LemixModel(forward_s=0.12, backward_s=0.14, weight_bytes=4.5e9, hardware=ADA6000),
    "llama-8b": LemixModel(forward_s=0.11, backward_s=0.15, weight_bytes=13e9, hardware=A100),
    "llama-13b": LemixModel(forward_s=0.24, backward_s=0.36, weight_bytes=26e9, hardware=A100),
    "llama-70b": LemixModel(forward_s=0.73, backward_s=1.05, weight_bytes=132e9, hardware=A100),
}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Settings of the comparison."""

    models: tuple[str, ...] = ("gpt-2.5b", "llama-8b", "llama-70b")
    """Names of models, from `MODELS`."""
    rates: tuple[float, ...] = (20.0, 50.0, 150.0)
    """Tasks per second."""
    training_shares: tuple[float, ...] = (0.1, 0.25, 0.35, 0.5, 0.75, 0.9)
    """Shares of the tasks that train."""
    num_tasks: int = 1000
    """Tasks per run; 1,000 in the paper."""
    training_in_flight: int | None = None
    """Maximum number of training tasks of a node at once (`NodeView`)."""
    seed: int = 0
    """Seed of arrivals and lengths."""


def run(config: ClusterConfig, watch: Watch = lambda words: None) -> dict[str, Any]:
    """Run all placements at all settings.

    Returns:
        JSON: means over the settings by placement, the results at each setting, ratios, and the
            time of scheduling.
    """
    cells = list[dict[str, Any]]()
    for model, rate, share in product(config.models, config.rates, config.training_shares):
        watch(f"{model}, {rate:g} tasks/s, {share:.0%} of them training")
        cells += [_cell(model, rate, share, placement, config) for placement in PLACEMENTS]
    rows = [_mean_row(placement, cells) for placement in PLACEMENTS]
    watch(f"the most at an attainment of {EQUAL_ATTAINMENT:.0%}")
    equal = [
        _at_equal_attainment(model, share, config)
        for model in config.models
        for share in config.training_shares
    ]
    watch(f"scheduling at {SCHEDULING_RATE:g} tasks/s")
    return {
        "rows": rows,
        "cells": cells,
        "over_separate": {name: _over(name, "separate", cells) for name in ("lemix", OURS)},
        "paper_over_separate": {"throughput": PAPER_THROUGHPUT, "attainment": PAPER_ATTAINMENT},
        "bound_over_separate": max(cell["bound_over_separate"] for cell in cells),
        "paper_utilisation": PAPER_UTILISATION,
        "equal_attainment": EQUAL_ATTAINMENT,
        "at_equal_attainment": equal,
        "ours_over_lemix": round(_total(equal, OURS) / _total(equal, "lemix"), 3),
        "scheduling_ms": {name: _scheduling_ms(name, CALM_MODEL, config) for name in PLACEMENTS},
        "scheduling_overload_ms": {
            name: _scheduling_ms(name, OVERLOADED_MODEL, config) for name in PLACEMENTS
        },
    }


def tasks(
    model: LemixModel, *, rate: float, training_share: float, number: int, seed: int
) -> list[ClusterTask]:
    """Return a Poisson process of requests and training tasks."""
    random, at_s, result = Random(seed), 0.0, []
    sigma = sqrt(log(_SECOND_MOMENT))
    for index in range(number):
        at_s += random.expovariate(rate)
        kind: TaskKind = "training" if random.random() < training_share else "request"
        length = min(
            _LONGEST, max(1, round(random.lognormvariate(log(_MEAN_LENGTH) - sigma**2 / 2, sigma)))
        )
        result.append(
            ClusterTask(
                id=str(index), kind=kind, arrival_s=at_s, num_tokens=length, ttft_s=model.slo_s
            )
        )
    return result


def play(
    model: LemixModel,
    placement: str,
    training_share: float,
    given: Sequence[ClusterTask],
    *,
    training_in_flight: int | None = None,
) -> tuple[SimulationResult, float]:
    """Run one placement, and return the result and the mean loss of its requests."""
    is_separate = placement.startswith("separate")
    settings = {"training_share": training_share} if placement == "separate" else {}
    nodes = {
        f"node-{index}": PipelineNode(
            f"node-{index}",
            model.profile(),
            hardware=model.hardware.name,
            num_stages=NUM_STAGES,
            training_in_flight=training_in_flight,
        )
        for index in range(NUM_NODES)
    }
    seen, losses, num_trained = dict.fromkeys(nodes, 0), list[float](), 0

    def on_end(outcome: TaskOutcome, now_s: float) -> None:
        nonlocal num_trained
        assert outcome.node is not None
        if not outcome.task.trains:
            losses.append(loss_after(seen[outcome.node]))
            return
        num_trained += 1
        if not is_separate:
            seen[outcome.node] += 1
        elif num_trained % _SYNC_TASKS == 0:
            for name, node in nodes.items():
                if name not in trained_here:
                    node.pause(now_s, model.sync_s)
                    seen[name] = num_trained
        trained_here.add(outcome.node)

    trained_here = set[str]()
    ran = ClusterSimulation(
        list(nodes.values()), make_placement(placement, settings), on_end=on_end
    ).run(given)
    return ran, mean(losses) if losses else 0.0


def least_s(
    model: LemixModel,
    given: Sequence[ClusterTask],
    *,
    num_nodes: int,
    training_in_flight: int | None,
) -> float:
    """Return a lower bound on the seconds in which any placement runs these tasks on nodes."""
    profile = model.profile()
    forward_s = {task.id: profile.forward.seconds(task.num_tokens) for task in given}
    trained_s = {
        task.id: forward_s[task.id] + profile.backward.seconds(task.num_tokens)
        for task in given
        if task.trains
    }
    stage_s = sum((forward_s | trained_s).values()) / num_nodes
    in_turns_s = (
        NUM_STAGES * sum(trained_s.values()) / num_nodes / training_in_flight
        if training_in_flight
        else 0.0
    )
    return max(stage_s, in_turns_s, max([task.arrival_s for task in given], default=0.0))


def _bound_over_separate(
    model: LemixModel, share: float, given: Sequence[ClusterTask], config: ClusterConfig
) -> float:
    """Return the tasks/s of nodes that are never idle over those of separate nodes that are idle
    when their side is done.
    """
    num_training = split(NUM_NODES, share)
    sides = {True: num_training, False: NUM_NODES - num_training}
    apart_s = [
        least_s(
            model,
            [task for task in given if task.trains == trains],
            num_nodes=number,
            training_in_flight=config.training_in_flight,
        )
        for trains, number in sides.items()
    ]
    mixed_s = least_s(
        model, given, num_nodes=NUM_NODES, training_in_flight=config.training_in_flight
    )
    return max(apart_s) / mixed_s


def _cell(
    name: str, rate: float, share: float, placement: str, config: ClusterConfig
) -> dict[str, Any]:
    model = MODELS[name]
    given = tasks(model, rate=rate, training_share=share, number=config.num_tasks, seed=config.seed)
    ran, loss = play(model, placement, share, given, training_in_flight=config.training_in_flight)
    train = {one.node for one in ran.outcomes.values() if one.task.trains}
    busy = {
        kind: [s for node, s in ran.busy_s.items() if (node in train) == kind]
        for kind in (True, False)
    }
    sides = {
        kind: round(mean(each) / ran.end_s, 4) if each else None for kind, each in busy.items()
    }
    return {
        "model": name,
        "hardware": model.hardware.name,
        "rate": rate,
        "training_share": share,
        "placement": placement,
        "throughput": round(ran.throughput, 3),
        "utilisation": round(ran.utilisation, 4),
        "utilisation_training": sides[True],
        "utilisation_serving": sides[False],
        "attainment": round(ran.attainment(model.slo_s), 4),
        "inference_loss": round(loss, 4),
        "bound_over_separate": round(_bound_over_separate(model, share, given, config), 3),
        "nodes_used": len({one.node for one in ran.outcomes.values()}),
    }


def _mean_row(placement: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [cell for cell in cells if cell["placement"] == placement]
    names = ("throughput", "utilisation", "attainment", "inference_loss")
    return {
        "placement": placement,
        **{name: round(mean(cell[name] for cell in own), 4) for name in names},
    }


def _over(placement: str, other: str, cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the most that a placement reaches over another one at any setting."""
    keys = ("model", "rate", "training_share")
    others = {
        tuple(cell[key] for key in keys): cell for cell in cells if cell["placement"] == other
    }
    pairs = [
        (cell, others[tuple(cell[key] for key in keys)])
        for cell in cells
        if cell["placement"] == placement
    ]
    figures = {
        name: max(a[name] / b[name] for a, b in pairs if b[name] > 0.0)
        for name in ("throughput", "utilisation", "attainment")
    }
    figures["inference_loss"] = min(a["inference_loss"] / b["inference_loss"] for a, b in pairs)
    return {name: round(value, 3) for name, value in figures.items()}


def _at_equal_attainment(name: str, share: float, config: ClusterConfig) -> dict[str, Any]:
    """Return the most tasks per second of LeMix and of ours over loads at which that share of the
    requests hold their SLO.
    """
    model = MODELS[name]
    result: dict[str, Any] = {"model": name, "training_share": share, "lemix": 0.0, OURS: 0.0}
    for load in _LOADS:
        rate = load * model.capacity(share)
        given = tasks(
            model, rate=rate, training_share=share, number=config.num_tasks, seed=config.seed + 1
        )
        for placement in ("lemix", OURS):
            ran, _ = play(
                model, placement, share, given, training_in_flight=config.training_in_flight
            )
            if ran.attainment(model.slo_s) >= EQUAL_ATTAINMENT:
                result[placement] = max(result[placement], round(ran.throughput, 3))
    return result


def _total(equal: Sequence[dict[str, Any]], placement: str) -> float:
    """Return the sum of the shares of the capacity, so that all models count alike."""
    total = sum(
        row[placement] / MODELS[row["model"]].capacity(row["training_share"]) for row in equal
    )
    return total or float("nan")


def _scheduling_ms(placement: str, name: str, config: ClusterConfig) -> float:
    """Return the milliseconds of this process for scheduling a task, at 150 tasks per second, a
    tenth of them training.
    """
    model, share = MODELS[name], 0.1
    given = tasks(
        model, rate=SCHEDULING_RATE, training_share=share, number=config.num_tasks, seed=config.seed
    )
    ran, _ = play(model, placement, share, given, training_in_flight=config.training_in_flight)
    return round(1e3 * ran.scheduling_s / max(1, ran.num_placed), 4)
