"""Ask what a policy would do on a GPU that is not here: a Llama 3.1 8B on an A100, an hour of requests in seconds.

python examples/simulate_policy.py [POLICY ...]
"""

import sys
from random import Random
from statistics import quantiles

from coserve import EngineConfig, Example, LoraConfig, TuningConfig
from coserve.engine.core import EngineCore
from coserve.engine.request import Chunk
from coserve.models import load_backbone
from coserve.scheduling.latency import LatencyModel
from coserve.simulate.hardware import Hardware, roofline_profile
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.simulation import Arrival, Simulation

A100 = Hardware(name="A100", flops_per_s=2.2e14, bytes_per_s=1.5e12, call_s=5e-6)
SECONDS, RATE = 120.0, 2.0


def main(policies: list[str]) -> None:
    """Print first-token times and fine-tuning tokens per second under each policy."""
    backbone = load_backbone("dummy:llama-3.1-8b", device="meta", dtype="bfloat16")  # shapes alone
    profile = roofline_profile(backbone, A100)
    for policy in policies:
        device = ModelledDevice(backbone, profile, num_pages=20_000)
        engine = EngineCore(device, LatencyModel(profile), EngineConfig(policy=policy, tpot_s=0.05))
        examples = [Example(tokens=(1,) * 512, trained=(True,) * 512)] * 64
        engine.submit_examples(examples, TuningConfig(num_epochs=10_000), adapter=LoraConfig(r=16))
        arrivals = list(poisson())
        began = {f"request-{n}": arrival.at_s for n, arrival in enumerate(arrivals)}
        firsts: list[float] = []
        for snapshot in Simulation(engine, arrivals).run(SECONDS):
            last = snapshot
        harvest = last.num_tokens_trained / last.now_s
        print(f"{policy}: {harvest:.0f} fine-tuning tokens/s")


def poisson() -> "list[Arrival]":
    """Requests that come independently of one another."""
    rng, at_s, found = Random(0), 0.0, []
    while (at_s := at_s + rng.expovariate(RATE)) < SECONDS:
        found.append(Arrival(at_s=at_s, num_prompt_tokens=rng.randint(50, 800), num_output_tokens=rng.randint(20, 200)))
    return found


if __name__ == "__main__":
    main(sys.argv[1:] or ["slack", "inference-only"])
