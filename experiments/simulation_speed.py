"""Seconds of computing for an hour of simulated time: a bursty trace beside one job, on a modelled
A100.

    python -m experiments.simulation_speed [--seconds 3600] [--rate 2]

The arrivals and lengths of half a minute of BurstGPT are repeated at this mean rate, on
llama-3.1-8b with a LoRA job of sequences of 1,024 tokens. Times are those of the thread. Prints the
simulated results, which must stay the same to the last digit where only the speed changes, and one
line of JSON.
"""

import argparse
import time
from pathlib import Path

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import load_backbone
from coserve.scheduling import LatencyModel
from coserve.simulate.hardware import A100
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.workloads.traces import read_trace, rescale
from experiments.results import add_save_option, print_result

TRACE = Path(__file__).parents[1] / ".." / "shared" / "data" / "burstgpt_slices.csv.gz"
# Bytes of the device for pages and weights.
DEVICE_BYTES = 72e9
SEQUENCE_TOKENS, NUM_EXAMPLES = 1024, 64


def make_simulation(*, rate: float, seconds: float) -> Simulation:
    """Return an engine with a job that never ends, and the arrivals."""
    backbone = load_backbone("dummy:llama-3.1-8b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, A100)
    empty = ModelledDevice(backbone, profile, num_pages=1).info
    num_pages = int((DEVICE_BYTES - empty.weight_bytes) / empty.page_bytes)
    engine = TokenEngine(
        ModelledDevice(backbone, profile, num_pages=num_pages),
        LatencyModel(profile),
        EngineConfig(),
    )
    example = Example(tokens=(1,) * SEQUENCE_TOKENS, trained=(True,) * SEQUENCE_TOKENS)
    engine.submit_examples(
        [example] * NUM_EXAMPLES,
        TuningConfig(num_epochs=10**6, batch_size=4, max_pack_tokens=SEQUENCE_TOKENS),
        adapter=LoraConfig(r=16),
    )
    trace = rescale(read_trace(TRACE, where={"slice": "span30s"}), rate=rate, seconds=seconds)
    arrivals = [
        Arrival(
            at_s=one.at_s,
            num_prompt_tokens=one.num_prompt_tokens,
            num_output_tokens=one.num_output_tokens,
        )
        for one in trace
    ]
    return Simulation(engine, arrivals)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--rate", type=float, default=2.0)
    add_save_option(parser)
    options = parser.parse_args()
    simulation = make_simulation(rate=options.rate, seconds=options.seconds)
    engine, start = simulation.engine, time.thread_time()
    snapshots = list(simulation.run(options.seconds))
    seconds = time.thread_time() - start
    result = {
        "simulated_s": snapshots[-1].now_s,
        "computing_s": round(seconds, 2),
        "steps": engine.num_steps,
        "us_per_step": round(1e6 * seconds / max(1, engine.num_steps), 1),
        "mean_running": round(sum(each.num_running for each in snapshots) / len(snapshots), 1),
        "num_ended": len(engine.records),
        "ttft_s": sum(record.ttft_s for record in engine.records),
        "tpot_s": sum(record.tpot_s or 0.0 for record in engine.records),
        "tokens_trained": snapshots[-1].num_tokens_trained,
    }
    for name, value in result.items():
        print(f"{name:16} {value}")
    print_result("simulation_speed", result, options.save)


if __name__ == "__main__":
    main()
