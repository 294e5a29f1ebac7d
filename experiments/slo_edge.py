"""Loads that requests alone just hold, and the same loads beside fine-tuning jobs, in simulated
time.

    python -m experiments.slo_edge [--loads 48] [--first-seed 0] [--rates FILE] [--share 1] [--write
    FILE]

    python -m experiments.slo_edge --random [--loads 62]

A seed names a load: a model on a modelled A100 or H100, 600 requests (of Azure's chats as recorded;
or with the arrivals of BurstGPT's densest half minute, repeated, and lengths of ShareGPT), SLOs,
pages, jobs, and noise of the times of steps. A rate is searched at which requests alone attain 99.0
to 99.9%. Then the same requests arrive beside jobs: once at that rate, where the SLOs must still be
attained by 99%, and once at half of it, where the throughput of jobs is to be compared before and
after a change. --rates: the result of an earlier run (--write), for the same loads without the
search. --share: at this share of the edge's rate, where requests alone are run again. --random: at
a random rate instead, from light to too much; only loads that requests alone hold count. The last
line is JSON.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import Backbone, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import A100, H100, Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.workloads.traces import TracedRequest, read_lengths, read_trace
from experiments.results import add_save_option, print_result

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"
MODELS = ("llama-3.1-8b", "qwen2.5-14b")
NUM_REQUESTS = 600
# Longer ones are left out.
MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 2048, 400
# What requests alone attain at the edge, and what must be attained beside jobs.
LEAST, MOST = 0.990, 0.999
# Bytes of the device for pages and weights, and the most pages that are worth simulating.
DEVICE_BYTES, MOST_PAGES = 72e9, 30_000
MOST_TRIALS = 24
# Random rates: in units of the one at which the search begins.
LIGHTEST, HEAVIEST = 0.2, 1.2


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests at one per second in the mean, with an engine and jobs."""

    seed: int
    """Seed of the load."""
    model: str
    """Preset of the model."""
    hardware: Hardware
    """Modelled device."""
    trace: str
    """Name of the trace."""
    requests: tuple[TracedRequest, ...]
    """Arrivals and lengths."""
    ttft_s: float
    """SLO: seconds to the first token."""
    num_pages: int
    """Pages of the pool."""
    num_jobs: int
    """Number of jobs."""
    length: int
    """Tokens per training example."""
    noise: float
    """Noise of the times of steps."""

    def __str__(self) -> str:
        return f"{self.seed:3} {self.model:13} {self.hardware.name} {self.trace:10}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of a load."""

    attained: float
    """Share of requests that attained their SLOs."""
    harvest: float
    """Rows of jobs, forward and backward, per second."""


@cache
def backbone_of(model: str) -> Backbone:
    """Return a model's shapes."""
    return load_backbone(f"dummy:{model}", device="meta", dtype="bfloat16")


@cache
def profile_of(model: str, hardware: Hardware) -> Profile:
    """Return the profile of a model on a device, by a roofline."""
    return roofline_profile(backbone_of(model), hardware)


@cache
def azure() -> list[TracedRequest]:
    """Return the recorded chats that are short enough."""
    recorded = read_trace(DATA / "azure_conv.csv.gz")
    return [each for each in recorded if is_short(each.num_prompt_tokens, each.num_output_tokens)]


@cache
def burst_s() -> list[float]:
    """Return the times of BurstGPT's arrivals, repeated for long enough."""
    burst = read_trace(DATA / "burstgpt_slices.csv.gz", where={"slice": "span30s"})
    seconds = burst[-1].at_s + 1
    return [
        each.at_s + again * seconds
        for again in range(1 + NUM_REQUESTS // len(burst))
        for each in burst
    ]


@cache
def lengths() -> list[tuple[int, int]]:
    """Return ShareGPT's lengths that are short enough."""
    return [each for each in read_lengths(DATA / "sharegpt_lengths.csv.gz") if is_short(*each)]


def is_short(num_prompt_tokens: int, num_output_tokens: int) -> bool:
    """Return whether a request is short enough to simulate."""
    return num_prompt_tokens <= MOST_PROMPT_TOKENS and num_output_tokens <= MOST_OUTPUT_TOKENS


def draw_requests(name: str, random: Random) -> list[TracedRequest]:
    """Return requests of a trace, at its own pace."""
    if name == "azure":
        first = random.randrange(len(azure()) - NUM_REQUESTS)
        return azure()[first : first + NUM_REQUESTS]
    times = sorted(
        [at_s + random.random() for at_s in burst_s()]
    )  # they are recorded in whole seconds
    return [
        TracedRequest(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output)
        for at_s, (prompt, output) in zip(times, random.sample(lengths(), len(times)), strict=True)
    ][:NUM_REQUESTS]


def make_load(seed: int) -> Load:
    """Return the load of a seed."""
    random = Random(seed)
    model, hardware, name = (
        random.choice(MODELS),
        random.choice([A100, H100]),
        random.choice(["azure", "burstgpt"]),
    )
    requests = draw_requests(name, random)
    pace = NUM_REQUESTS / (requests[-1].at_s - requests[0].at_s)
    counts = profile_of(model, hardware).model
    weight_bytes = 2 * (counts.flops_per_row + counts.head_flops_per_row) / 2
    num_pages = int(
        (DEVICE_BYTES - weight_bytes)
        / (16 * counts.kv_bytes_per_key)
        * random.choice([1.0, 1.0, 0.3])
    )
    return Load(
        seed=seed,
        model=model,
        hardware=hardware,
        trace=name,
        requests=tuple(
            [replace(each, at_s=(each.at_s - requests[0].at_s) * pace) for each in requests]
        ),
        ttft_s=random.choice([1.0, 2.0, 2.0, 4.0]),
        num_pages=min(MOST_PAGES, num_pages),
        num_jobs=random.choice([1, 1, 3]),
        length=random.choice([128, 512, 1024]),
        noise=random.choice([0.0, 0.05, 0.1]),
    )


def make_engine(load: Load, policy: str) -> TokenEngine:
    """Return an engine with its jobs, if the policy runs jobs."""
    profile = profile_of(load.model, load.hardware)
    device = ModelledDevice(
        backbone_of(load.model), profile, num_pages=load.num_pages, noise=load.noise, seed=load.seed
    )
    engine = TokenEngine(
        device, LatencyModel(profile), EngineConfig(policy=policy, ttft_s=load.ttft_s)
    )
    example = Example(tokens=(1,) * load.length, trained=(True,) * load.length)
    for _ in range(0 if policy == "inference-only" else load.num_jobs):
        config = TuningConfig(num_epochs=100_000)
        engine.submit_examples(
            [example] * 64, config, adapter=LoraConfig(r=16, target_modules="all-linear")
        )
    return engine


def simulate(load: Load, rate: float, policy: str, *, stop_below: float = 0.0) -> Run:
    """Run all requests to their ends, or until at most a share of them can attain their SLOs."""
    engine = make_engine(load, policy)
    arrivals = [
        Arrival(
            at_s=each.at_s / rate,
            num_prompt_tokens=each.num_prompt_tokens,
            num_output_tokens=each.num_output_tokens,
        )
        for each in load.requests
    ]
    num_seen = num_missed = 0
    for _ in Simulation(engine, arrivals, seed=load.seed).run(1e6):
        while num_seen < len(engine.records):
            num_missed += not engine.records[num_seen].attained
            num_seen += 1
        if num_seen == len(arrivals) or num_missed > (1 - stop_below) * len(arrivals):
            break
    rows = sum(job.num_rows_run for job in engine.jobs.values())
    return Run(attained=1 - num_missed / len(arrivals), harvest=rows / engine.device.clock.now())


def edge_rate(load: Load) -> tuple[float, float] | None:
    """Return a rate at which requests alone attain the wanted share, and the share; None if none
    was found.
    """
    low, high, rate = 0.0, 0.0, likely_rate(load)
    for _ in range(MOST_TRIALS):
        attained = simulate(load, rate, "inference-only", stop_below=LEAST).attained
        if LEAST <= attained <= MOST:
            return rate, attained
        if attained > MOST:
            low = rate
        else:
            high = rate
        rate = (low + high) / 2 if low and high else rate * (1.15 if low else 1 / 1.15)
        if low and high - low < 1e-3 * low and high:
            return None
    return None


def random_rate(load: Load) -> tuple[float, float] | None:
    """Return a random rate, and the share that requests alone attain; None if that is too low."""
    rate = Random(-1 - load.seed).uniform(LIGHTEST, HEAVIEST) * likely_rate(load)
    attained = simulate(load, rate, "inference-only", stop_below=LEAST).attained
    return (rate, attained) if attained >= LEAST else None


def likely_rate(load: Load) -> float:
    """Return a rate to start with, a little above the one at which 32 requests at once fill the
    device.
    """
    latency = LatencyModel(profile_of(load.model, load.hardware))
    prompt = sum(each.num_prompt_tokens for each in load.requests) // NUM_REQUESTS
    output = sum(each.num_output_tokens for each in load.requests) / NUM_REQUESTS
    return 1.6 / (
        latency.prompt_s(prompt) + output * latency.decode_s(num_requests=32, context=prompt) / 32
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=int, default=48)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*", help="these alone")
    parser.add_argument("--rates", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--random", action="store_true", help="at random rates, without a search")
    parser.add_argument("--edge-only", action="store_true", help="not at half the rate")
    parser.add_argument("--share", type=float, default=1.0, help="of the edge's rate")
    parser.add_argument("--policy", default="slack")
    add_save_option(parser)
    options = parser.parse_args()
    if not (DATA / "azure_conv.csv.gz").exists():
        print(f"skipped: there are no recorded traces in {DATA.resolve()}")
        print(json.dumps({"skipped": True}))
        return 0
    known = (
        {each["seed"]: each for each in json.loads(options.rates.read_text())["loads"]}
        if options.rates
        else {}
    )
    found: list[dict[str, float]] = []
    seed = options.first_seed - 1
    seeds = options.seeds or list(known)
    while len(found) < (len(seeds) or options.loads):
        seed = seeds[len(found)] if seeds else seed + 1
        load = make_load(seed)
        if seed in known:
            edge: tuple[float, float] | None = (known[seed]["rate"], known[seed]["alone"])
        else:
            edge = random_rate(load) if options.random else edge_rate(load)
        if edge is None:
            print(f"{load} requests alone do not hold their SLOs, or not just", flush=True)
            continue
        rate, alone = edge
        if options.share != 1.0:
            rate *= options.share
            alone = simulate(load, rate, "inference-only").attained
        line = {"seed": seed, "rate": rate, "alone": alone}
        beside = simulate(load, rate, options.policy)
        line |= {"beside": beside.attained, "harvest": beside.harvest}
        if not (options.edge_only or options.random):
            half = simulate(load, rate / 2, options.policy)
            line |= {"half_beside": half.attained, "half_harvest": half.harvest}
        found.append(line)
        mark = "" if beside.attained >= LEAST else "  MISSED"
        print(
            f"{load}",
            *(f"{key} {value:9.4f}" for key, value in line.items() if key != "seed"),
            mark,
            flush=True,
        )
        if options.write:
            options.write.write_text(json.dumps({"loads": found}, indent=1) + "\n")
    print_result("slo_edge", summary(found), options.save)
    return 0


def summary(found: list[dict[str, float]]) -> dict[str, object]:
    """Return the last line."""
    missed = [
        {"seed": each["seed"], "beside": each["beside"]} for each in found if each["beside"] < LEAST
    ]
    return {
        "loads": len(found),
        "held": len(found) - len(missed),
        "missed": missed,
        "mean_harvest": sum(each["harvest"] for each in found) / len(found),
        "half_mean_harvest": sum(each.get("half_harvest", 0.0) for each in found) / len(found),
        "half_least_attained": min(each.get("half_beside", 1.0) for each in found),
    }


if __name__ == "__main__":
    sys.exit(main())
