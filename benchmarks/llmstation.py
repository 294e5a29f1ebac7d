"""LLMStation's end-to-end comparison at several request rates (section 6.2, figure 9 i), on two modelled RTX 3090.

    python -m benchmarks.llmstation ../shared/data/sharegpt_lengths.csv.gz ../shared/data/alpaca_5k.jsonl.gz

Llama-3.1-8B, requests at a steady rate with the lengths of ShareGPT's first turns, TTFT 500 ms, TPOT 50 ms, and one
LoRA job of rank 16 on Alpaca. As in the paper, each baseline is tuned: of its settings the one counts that trains most
while both SLOs are held at p99; 0 where none does. The two devices are modelled as one twice as fast and large, which
need not communicate; spatial sharing has one copy of the weights, which vLLM beside torchtune has not, and jobs
have the whole device in steps without requests.
"""

import argparse
import json
from pathlib import Path
from random import Random

import torch

from benchmarks.flexllm import first_turns, joined
from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.cells import ATTAINMENT, Bench, CompareConfig
from coserve.bench.places import ModelledPlace
from coserve.models import load_backbone
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import RTX3090
from coserve.tuning.examples import Example
from coserve.workloads.arrivals import RecordedLengths
from coserve.workloads.datasets import read_dataset
from coserve.workloads.traces import TracedRequest, read_lengths

# By system of the paper, the policy here and the settings that are tried.
SYSTEMS = {
    "LLMStation": [
        f"llmstation:decode_share={share}:deferral={bound}" for share in (0.75, 0.9) for bound in (0.1, 0.5)
    ],
    "FineInfer": [f"fineinfer:deferral={bound}" for bound in (0.05, 0.25, 0.5, 0.9)],
    "vLLM + torchtune": [f"spatial-sharing:inference_share={share}" for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)],
    "chunked-training": [f"chunked-training:chunk_tokens={number}" for number in (64, 128, 256, 512, 1024)],
    "coserve": ["slack"],
}
# LLMStation over each baseline at 0.5 requests/s and less, in the paper (its 8B and 13B models).
PAPER = {"FineInfer": (2.38, 8.17), "vLLM + torchtune": (2.53, 14.77), "chunked-training": (1.57, 2.18)}
_CHARACTERS_PER_TOKEN = 4


def main() -> None:
    """Print a line for each rate and system, and end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("examples", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="of requests, at each rate")
    parser.add_argument("--rates", default="0.25,0.5,1,2,4")
    given = parser.parse_args()
    backbone = load_backbone("dummy:llama-3.1-8b", dtype="bfloat16", device=torch.device("meta"))
    place = ModelledPlace.of_hardware(backbone, joined(RTX3090, 2))
    config = CompareConfig(
        policies=(),
        seconds=given.seconds,
        batch=1,
        examples=_examples(given.examples),
        lora=LoraConfig(r=16, alpha=32, target_modules="all-linear"),
    )
    bench, slo = Bench(place, config), Slo(ttft_s=0.5, tpot_s=0.05)
    lengths, random = RecordedLengths(first_turns(read_lengths(given.lengths))), Random(0)
    drawn = [lengths.draw(random) for _ in range(2000)]
    rows = []
    for rate in [float(each) for each in given.rates.split(",")]:
        trace = [
            TracedRequest(at_s=index / rate, num_prompt_tokens=prompt, num_output_tokens=output)
            for index, (prompt, output) in enumerate(drawn[: int(rate * given.seconds)])
        ]
        best: dict[str, float] = {}
        for system, policies in SYSTEMS.items():
            found = [(bench.run(policy, trace, slo)[0], policy) for policy in policies]
            held = [
                (played.tuning_tokens_per_s, policy)
                for played, policy in found
                if (played.attainment(slo) or 0.0) >= ATTAINMENT
            ]
            best[system], policy = max(held, default=(0.0, ""))
            rows.append(
                {
                    "rate": rate,
                    "system": system,
                    "policy": policy or None,
                    "tuning_tokens_per_s": round(best[system]),
                    "most_attained": round(max(played.attainment(slo) or 0.0 for played, _ in found), 4),
                    "llmstation_over_it": round(best["LLMStation"] / best[system], 2) if best[system] else None,
                    "paper": PAPER.get(system) if rate <= 0.5 else None,
                }
            )
            print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"experiment": "llmstation", "seconds": given.seconds, "rows": rows}))


def _examples(path: Path) -> tuple[Example, ...]:
    """Of as many tokens as a data set's lines would have, about."""
    lines = [str(line["prompt"]) + str(line["completion"]) for line in read_dataset(path, most=512)]
    sizes = [max(2, len(line) // _CHARACTERS_PER_TOKEN) for line in lines]
    return tuple([Example(tokens=(1,) * size, trained=(True,) * size) for size in sizes])


if __name__ == "__main__":
    main()
