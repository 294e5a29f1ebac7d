"""Ask what a policy would do on a GPU that is not here: a Llama 3.1 8B on an A100, two minutes of
requests.

python examples/simulate_policy.py [POLICY ...]
"""

import sys
from collections.abc import Iterator
from random import Random
from statistics import quantiles

from coserve import EngineConfig, Example, LoraConfig, TuningConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import load_backbone
from coserve.scheduling.latency import LatencyModel
from coserve.simulate.hardware import A100
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation

SECONDS, RATE = 120.0, 2.0


def main(policies: list[str]) -> None:
    """Print first-token times and fine-tuning tokens per second under each policy."""
    backbone = load_backbone("dummy:llama-3.1-8b", device="meta", dtype="bfloat16")  # shapes alone
    profile = roofline_profile(backbone, A100)
    for policy in policies:
        device = ModelledDevice(backbone, profile, num_pages=20_000)
        engine = TokenEngine(
            device, LatencyModel(profile), EngineConfig(policy=policy, tpot_s=0.05)
        )
        examples = [Example(tokens=(1,) * 512, trained=(True,) * 512)] * 64
        engine.submit_examples(examples, TuningConfig(num_epochs=10_000), adapter=LoraConfig(r=16))
        for snapshot in Simulation(engine, list(poisson())).run(SECONDS):
            last = snapshot
        attained = sum(record.attained for record in engine.records) / len(engine.records)
        p99_s = quantiles([record.ttft_s for record in engine.records], n=100)[98]
        harvest = last.num_tokens_trained / last.now_s
        print(
            f"{policy:15} SLOs held {attained:6.1%}  TTFT p99 {1e3 * p99_s:4.0f} ms  harvest "
            f"{harvest:5.0f} tokens/s"
        )


def poisson() -> Iterator[Arrival]:
    """Yield requests that arrive independently of one another."""
    rng, at_s = Random(0), 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < SECONDS:
        yield Arrival(
            at_s=at_s,
            num_prompt_tokens=rng.randint(50, 800),
            num_output_tokens=rng.randint(20, 200),
        )


if __name__ == "__main__":
    main(sys.argv[1:] or ["slack", "inference-only"])
