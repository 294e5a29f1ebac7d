"""Placements on modelled nodes with engines, which batch prompts, under bursts, in virtual time.

    python -m experiments.cluster_engines [--placement NAME] [--rates 50,80] [--seconds 12]

Four nodes, each an engine with llama-3.1-8b on a modelled H100, with the default SLO. Requests have
the lengths of Azure's chats with up to 100 tokens in their answers, and arrive in quiet times of 2
s and bursts of 0.75 s in the mean, of six times their rate. `slack-affinity` runs with several
numbers of requests that may wait on an engine to begin (`most_prompts`). Reports of nodes arrive
after 5 ms. The last line is JSON.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from coserve.bench.places import ModelledPlace
from coserve.cluster.nodes.profiler import node_profile
from coserve.cluster.placement import make_placement
from coserve.cluster.view import ClusterTask
from coserve.engine.config import EngineConfig
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import load_backbone
from coserve.scheduling.slo import default_tpot_s
from coserve.simulate.hardware import H100
from coserve.workloads.arrivals import RecordedLengths, bursty
from coserve.workloads.summary import percentile
from coserve.workloads.traces import TracedRequest, read_trace
from experiments.cluster_simulation.engine import EngineNode
from experiments.cluster_simulation.simulation import ClusterSimulation, TaskOutcome
from experiments.results import add_save_option, print_result
from experiments.worker_processes import worker_processes

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"
NUM_NODES, TTFT_S, MESSAGES_S = 4, 2.0, 0.005
# Longer ones are left out.
MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 4096, 100
QUIET_S, BURST_S = 2.0, 0.75


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Settings of a run."""

    rate: float
    """Requests per second."""
    seconds: float
    """Seconds of arrivals."""
    seed: int
    """Seed of arrivals and lengths."""
    placement: str
    """Name of the placement."""
    settings: dict[str, float] = field(default_factory=dict)
    """Settings of the placement."""


def requests_of(cell: Cell) -> list[TracedRequest]:
    """Return the requests of a run."""
    trace = read_trace(DATA / "azure_conv.csv.gz")
    pairs = [(each.num_prompt_tokens, each.num_output_tokens) for each in trace]
    lengths = RecordedLengths([pair for pair in pairs if fits(*pair)])
    return bursty(
        rate=cell.rate,
        seconds=cell.seconds,
        seed=cell.seed,
        quiet_s=QUIET_S,
        burst_s=BURST_S,
        lengths=lengths,
    )


def fits(num_prompt_tokens: int, num_output_tokens: int) -> bool:
    """Return whether a chat is short enough."""
    return (
        0 < num_prompt_tokens <= MOST_PROMPT_TOKENS and 0 < num_output_tokens <= MOST_OUTPUT_TOKENS
    )


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell, and return its result."""
    backbone = load_backbone("dummy:llama-3.1-8b", dtype="bfloat16", device="meta")
    place = ModelledPlace.of_hardware(backbone, H100)
    tpot_s = default_tpot_s(place.latency)
    profile = node_profile(
        place.profile,
        page_bytes=kv_page_bytes(backbone, 16),
        num_pages=place.num_pages,
        training_yields=True,
    )
    nodes = [
        EngineNode(
            f"n{index}", replace(place, seed=index).open(EngineConfig(ttft_s=TTFT_S)), profile
        )
        for index in range(NUM_NODES)
    ]
    tasks = [
        ClusterTask(
            id=f"r{index}",
            kind="request",
            arrival_s=each.at_s,
            num_tokens=each.num_prompt_tokens,
            num_output_tokens=each.num_output_tokens,
            ttft_s=TTFT_S,
            tpot_s=tpot_s,
        )
        for index, each in enumerate(requests_of(cell))
    ]
    placement = make_placement(cell.placement, cell.settings)
    ran = ClusterSimulation(nodes, placement, messages_s=MESSAGES_S).run(tasks)
    ttfts_s = [one.response_s for one in ran.requests]
    tpots_s = [tpot_of(one) for one in ran.requests]
    held = [a <= TTFT_S and b <= 1.01 * tpot_s for a, b in zip(ttfts_s, tpots_s, strict=True)]
    return {
        **asdict(cell),
        "requests": len(tasks),
        "ttft_p50_ms": round(1e3 * percentile(ttfts_s, 0.5), 1),
        "ttft_p99_ms": round(1e3 * percentile(ttfts_s, 0.99), 1),
        "tpot_p99_ms": round(1e3 * percentile(tpots_s, 0.99), 2),
        "attainment": round(sum(held) / len(held), 4),
        "throughput": round(ran.throughput, 2),
        "scheduling_ms": round(1e3 * ran.scheduling_s / len(tasks), 3),
    }


def tpot_of(outcome: TaskOutcome) -> float:
    """Return the seconds of a token after the first."""
    if outcome.end_s is None or outcome.first_token_s is None:
        return inf
    return (outcome.end_s - outcome.first_token_s) / max(1, outcome.task.num_output_tokens - 1)


def placements() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield placements with their settings."""
    yield "round-robin", {}
    yield "lemix", {}
    for most in (1, 2, 4, 8, 16):
        yield "slack-affinity", {"most_prompts": most}


def main() -> None:
    """Run all cells and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--placement", help="this one alone")
    parser.add_argument("--rates", default="50,80")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    add_save_option(parser)
    options = parser.parse_args()
    cells = [
        Cell(rate=rate, seconds=options.seconds, seed=seed, placement=name, settings=settings)
        for rate, (name, settings), seed in product(
            map(float, options.rates.split(",")), placements(), range(options.seeds)
        )
        if options.placement in (None, name)
    ]
    rows = list[dict[str, Any]]()
    with worker_processes(options.workers) as pool:
        for row in pool.map(run, cells):
            rows.append(row)
            shown = {name: value for name, value in row.items() if name != "seconds"}
            print(" ".join(f"{name} {value}" for name, value in shown.items()), file=sys.stderr)
    print_result("cluster_engines", {"rows": rows}, options.save)


if __name__ == "__main__":
    main()
