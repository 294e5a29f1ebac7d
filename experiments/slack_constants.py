"""Effect of each constant of the default policy: attainment and tuning throughput at half and at
twice its value.

    python -m experiments.slack_constants [NAME …] [--find-rates] [--write FILE]

Simulated loads of chats beside fine-tuning jobs: at the highest rate at which requests alone attain
99% of their SLOs (the edge), in bursts, above it, with few pages or slots, long prompts, many jobs,
a short TTFT, and on a slow CPU. One constant at a time is changed; of a share near 1, the distance
to 1 is halved and doubled. Attainment is shown in points of a hundredth, as the difference from the
unchanged constant; throughput (rows of jobs per second) as a ratio. NAME: these constants only.
--find-rates: search the edges anew, instead (`RATES`). The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import Backbone, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import A100, Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from experiments.results import add_save_option, print_result

CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)

# Modules in which constants lie, with the names of those that are varied.
CONSTANTS = {
    "coserve.scheduling.slo.step_budget": (
        "URGENT_SHARE",
        "MAX_SHARE",
        "MAX_ARRIVAL_SHARE",
        "SCARCE",
        "QUEUED_SHARE",
    ),
    "coserve.scheduling.slo.allowance": (
        "NEAR",
        "MARGINAL",
        "FAR",
        "FAR_SHARE",
        "FILLED",
        "WAIT_SHARE_OF_REST",
        "NEAR_RESERVE_TPOTS",
        "NEAR_LEAST_SHARE",
        "MAX_LATE_SHARE",
    ),
    "coserve.scheduling.slo.deadlines": (
        "RESERVE_TOKENS",
        "AIMED",
        "INFEASIBLE_STRETCH",
        "SURE_MARGINS",
        "URGENT_CATCH_UP_SHARE",
        "FREE_CATCH_UP_SHARE",
        "MIN_ANSWER_TOKENS",
    ),
    "coserve.scheduling.slo.infeasible": ("MAX_WAIT_TTFTS",),
    "coserve.scheduling.policies.slack": ("AGED_WAITS", "PACK_STRETCH", "CAN_WAIT_TIMES"),
}
# Of these, what is missing to 1 is varied.
SHARES_NEAR_1 = {"MAX_SHARE", "NEAR", "MARGINAL", "FILLED", "AIMED"}


@dataclass(frozen=True, kw_only=True)
class Load:
    """Chats that arrive at some rate, beside jobs."""

    name: str
    """Name of the load."""
    model: str = "llama-3.1-8b"
    """Preset of the model."""
    hardware: Hardware = A100
    """Modelled device."""
    rate: float = 1.0
    """Requests per second, as a share of the edge's rate."""
    burst: float = 1.0
    """Factor of the rate in a quarter of the time; in the rest it is lower, with the same mean."""
    num_requests: int = 160
    """Number of requests."""
    prompt: int = 300
    """Mean tokens per prompt."""
    output: int = 50
    """Mean tokens per answer."""
    num_pages: int = 16_000
    """Pages of the pool."""
    max_requests: int = 256
    """Maximum number of sequences at once."""
    num_jobs: int = 1
    """Number of jobs."""
    length: int = 512
    """Tokens per training example."""
    ttft_s: float = 0.5
    """SLO: seconds to the first token."""
    noise: float = 0.05
    """Noise of the times of steps."""


LOADS = (
    Load(name="edge", num_requests=240),
    Load(name="bursts", burst=3.0),
    Load(name="few pages", rate=0.8, num_pages=1700, num_jobs=3, length=1024, num_requests=120),
    Load(
        name="slow CPU",
        model="qwen2.5-0.5b",
        hardware=CPU,
        rate=0.9,
        prompt=100,
        num_jobs=2,
        length=256,
        ttft_s=2.0,
    ),
    Load(name="long prompts", rate=0.95, prompt=1500, ttft_s=1.0, num_requests=120),
    Load(name="short TTFT", rate=0.9, burst=2.0, ttft_s=0.2, num_requests=200),
    Load(name="many jobs", rate=0.5, num_jobs=6, length=256, num_pages=3000, num_requests=120),
    Load(name="no pages", rate=0.8, num_jobs=3, num_pages=850, num_requests=120),
    Load(name="overload", rate=1.6, num_requests=240),
    Load(name="few slots", rate=0.9, max_requests=24, num_jobs=2, num_requests=120),
    Load(name="alone", rate=1.0, burst=3.0, num_jobs=0),
)
# Requests per second at the edge, by load (`--find-rates`).
RATES = {
    "edge": 29.0,
    "bursts": 11.75,
    "few pages": 26.5,
    "slow CPU": 3.375,
    "long prompts": 5.125,
    "short TTFT": 14.25,
    "many jobs": 28.0,
    "no pages": 26.5,
    "overload": 29.0,
    "few slots": 20.0,
    "alone": 11.75,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of a load."""

    attained: float
    """Share of requests that attained their SLOs."""
    rows_per_s: float
    """Rows of jobs per second."""


@cache
def backbone_of(model: str) -> Backbone:
    """Return a model's shapes."""
    return load_backbone(f"dummy:{model}", device="meta", dtype="bfloat16")


@cache
def profile_of(model: str, hardware: Hardware) -> Profile:
    """Return the profile of a model on a device, by a roofline."""
    return roofline_profile(backbone_of(model), hardware)


def arrivals(load: Load, rate: float) -> list[Arrival]:
    """Return the chats of a load at a rate, the same each time."""
    rng, at_s, result = Random(1), 0.0, list[Arrival]()
    low = (4 - load.burst) / 3  # of the mean rate, outside of bursts
    while len(result) < load.num_requests:
        now = load.burst if at_s % 8 < 2 else max(low, 0.05)
        at_s += rng.expovariate(rate * now)
        prompt = 1 + int(load.prompt * rng.lognormvariate(0, 0.6))
        output = 1 + int(load.output * rng.lognormvariate(0, 0.5))
        result.append(Arrival(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output))
    return result


def simulate(load: Load, rate: float, policy: str = "slack") -> Run:
    """Serve all requests of a load to their ends."""
    profile = profile_of(load.model, load.hardware)
    device = ModelledDevice(
        backbone_of(load.model), profile, num_pages=load.num_pages, noise=load.noise, seed=1
    )
    config = EngineConfig(policy=policy, ttft_s=load.ttft_s, max_requests=load.max_requests)
    engine = TokenEngine(device, LatencyModel(profile), config)
    example = Example(tokens=(1,) * load.length, trained=(True,) * load.length)
    for _ in range(0 if policy == "inference-only" else load.num_jobs):
        endless = TuningConfig(num_epochs=100_000)
        engine.submit_examples(
            [example] * 64, endless, adapter=LoraConfig(r=16, target_modules="all-linear")
        )
    for _ in Simulation(engine, arrivals(load, rate), seed=1).run(1e6):
        if len(engine.records) == load.num_requests:
            break
    rows = sum([job.num_rows_run for job in engine.jobs.values()])
    attained = sum([record.attained for record in engine.records]) / load.num_requests
    return Run(attained=attained, rows_per_s=rows / engine.device.clock.now())


def edge_rate(load: Load) -> float:
    """Return the highest rate, to within 3%, at which requests alone attain 99%."""
    low, high = 0.5, 1.0
    while simulate(load, high, "inference-only").attained >= 0.99:
        low, high = high, 2 * high
    while high > 1.03 * low:
        middle = (low + high) / 2
        if simulate(load, middle, "inference-only").attained >= 0.99:
            low = middle
        else:
            high = middle
    return low


def varied(name: str, value: Any, factor: float) -> Any:
    """Return a constant at half or at twice its value (factor)."""
    if isinstance(value, tuple):
        return tuple([varied(name, each, factor) for each in value])
    if name in SHARES_NEAR_1:
        return 1 - factor * (1 - value)
    return type(value)(factor * value)


@contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    """Set a constant in all modules of scheduling that have it."""
    modules = [
        each
        for path, each in sys.modules.items()
        if path.startswith("coserve.scheduling") and each is not None
    ]
    holders = [module for module in modules if name in vars(module)]
    before = getattr(holders[0], name)
    try:
        for module in holders:
            setattr(module, name, value)
        yield
    finally:
        for module in holders:
            setattr(module, name, before)


def _ratio(value: float, before: float) -> float:
    return round(value / before, 3) if before else 1.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--find-rates", action="store_true")
    parser.add_argument("--write", type=Path)
    add_save_option(parser)
    options = parser.parse_args()
    if options.find_rates:
        print(json.dumps({load.name: round(edge_rate(load), 4) for load in LOADS}))
        return
    plain = {load.name: simulate(load, load.rate * RATES[load.name]) for load in LOADS}
    for name, run in plain.items():
        print(f"{name:12} attained {run.attained:.4f}  rows/s {run.rows_per_s:9.1f}", flush=True)
    rows = []
    for path, names in CONSTANTS.items():
        for name in names:
            if options.names and name not in options.names:
                continue
            value = getattr(import_module(path), name)
            for words, factor in (("half", 0.5), ("twice", 2.0)):
                with changed(name, varied(name, value, factor)):
                    runs = {
                        load.name: simulate(load, load.rate * RATES[load.name]) for load in LOADS
                    }
                row = {"name": name, "value": value, "at": words, "as": varied(name, value, factor)}
                row["attained"] = {
                    key: round(run.attained - plain[key].attained, 4) for key, run in runs.items()
                }
                row["rows"] = {
                    key: _ratio(run.rows_per_s, plain[key].rows_per_s) for key, run in runs.items()
                }
                rows.append(row)
                cells = [
                    f"{100 * row['attained'][key]:+5.1f} {row['rows'][key]:5.2f}" for key in plain
                ]
                print(f"{name:22} {words:6}", *cells, sep="  ", flush=True)
                if options.write:
                    options.write.write_text(json.dumps(rows) + "\n")
    print_result(
        "slack_constants",
        {
            "plain": {key: [run.attained, run.rows_per_s] for key, run in plain.items()},
            "rows": rows,
        },
        options.save,
    )


if __name__ == "__main__":
    main()
