"""FlexLLM's end-to-end comparison (section 8.1, figure 10) and its table of evictions (appendix B), on modelled A100s.

    python benchmarks/flexllm.py ../shared/data/azure_conv.csv.gz ../shared/data/sharegpt_lengths.csv.gz

Four pipelines serve and fine-tune, each on 1, 2 or 4 A100s by the model. Here one of them is modelled, which gets a
quarter of the requests: Azure's arrivals with the lengths of ShareGPT's first turns; LoRA of rank 16 on the down
projections, sequences of 8,192 tokens. Several devices are modelled as one that is as many times as fast and large,
and need not communicate. Beside co-serving stands the paper's strongest split: three pipelines for requests, one for
fine-tuning.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.cells import ALONE, JOBS_ALONE, Bench, CompareConfig
from coserve.bench.open_loop import Played
from coserve.bench.places import ModelledPlace
from coserve.models import load_backbone
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import A100, Hardware
from coserve.workloads.arrivals import RecordedLengths
from coserve.workloads.traces import TracedRequest, read_lengths, read_trace, rescale

_NUM_PIPELINES = 4
_LORA = LoraConfig(r=16, alpha=32, target_modules=("down_proj",))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Of the paper. tuning: its tokens/s at 4 and at 20 requests/s, co-serving and with a pipeline of its own.
    evictions: shares of the requests at the rates below.
    """

    model: str
    num_devices: int
    tpot_s: float
    tuning: dict[int, tuple[float, float]]
    evictions: tuple[float, ...]


_RATES = (4, 8, 12, 16, 20)
# Separate tuning at 4 requests/s follows from section 8.1: 2.5 to 6.8 times less than co-serving.
_SETTINGS = (
    Setting(
        model="llama-3.1-8b",
        num_devices=1,
        tpot_s=0.05,
        tuning={4: (9400, 3800), 20: (7200, 3800)},
        evictions=(0.0,) * 5,
    ),
    Setting(
        model="qwen2.5-14b",
        num_devices=2,
        tpot_s=0.075,
        tuning={4: (3700, 1000), 20: (2200, 1000)},
        evictions=(0.0,) * 5,
    ),
    Setting(
        model="qwen2.5-32b",
        num_devices=4,
        tpot_s=0.075,
        tuning={4: (3200, 500), 20: (2200, 500)},
        evictions=(0.0, 0.0, 0.0, 0.0029, 0.012),
    ),
)


def main() -> None:
    """Print a line for each model and rate, and end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the trace, at each rate")
    parser.add_argument("--models", default=",".join(setting.model for setting in _SETTINGS))
    parser.add_argument("--pages", type=int, help="of 16 tokens, for requests and jobs [what the devices have]")
    parser.add_argument("--policies", default="slack,token-fusion")
    parser.add_argument("--rates", default=",".join(str(rate) for rate in _RATES))
    given = parser.parse_args()
    lengths, random = RecordedLengths(first_turns(read_lengths(given.lengths))), Random(0)
    drawn = [(each, lengths.draw(random)) for each in read_trace(given.trace)]
    trace = [replace(each, num_prompt_tokens=prompt, num_output_tokens=output) for each, (prompt, output) in drawn]
    rows = []
    for setting in _SETTINGS:
        if setting.model in given.models.split(","):
            rates = [int(rate) for rate in given.rates.split(",")]
            policies = given.policies.split(",")
            rows += _run(setting, trace, policies, rates, seconds=given.seconds, num_pages=given.pages)
    print(json.dumps({"experiment": "flexllm", "seconds": given.seconds, "rows": rows}))


def _run(
    setting: Setting,
    trace: Sequence[TracedRequest],
    policies: Sequence[str],
    rates: Sequence[int],
    *,
    seconds: float,
    num_pages: int | None,
) -> list[dict[str, Any]]:
    backbone = load_backbone(f"dummy:{setting.model}", dtype="bfloat16", device=torch.device("meta"))
    place = ModelledPlace.of_hardware(backbone, joined(A100, setting.num_devices))
    if num_pages is not None:
        place = replace(place, num_pages=num_pages)
    slo = Slo(ttft_s=5.0, tpot_s=setting.tpot_s)
    config = CompareConfig(policies=tuple(policies), seconds=seconds, batch=1, sequence=8192, lora=_LORA)
    bench = Bench(place, config)
    alone = bench.run(JOBS_ALONE, [], slo)[0].tuning_tokens_per_s
    rows = []
    for rate in rates:
        apart = bench.run(ALONE, rescale(trace, rate=rate / 3, seconds=seconds), slo, num_jobs=0)[0]
        for policy in policies:
            played, engine = bench.run(policy, rescale(trace, rate=rate / _NUM_PIPELINES, seconds=seconds), slo)
            row = {
                "model": setting.model,
                "rate": rate,
                "policy": policy,
                "attainment": _rounded(played.attainment(slo)),
                "tuning_tokens_per_s": round(_NUM_PIPELINES * played.tuning_tokens_per_s),
                "separate_attainment": _rounded(apart.attainment(slo)),
                "separate_tuning_tokens_per_s": round(alone),
                "ratio": round(_NUM_PIPELINES * played.tuning_tokens_per_s / alone, 2),
                "paper_ratio": _paper_ratio(setting, rate),
                "evicted": _rounded(_share_evicted(played)),
                "paper_evicted": setting.evictions[_RATES.index(rate)] if rate in _RATES else None,
                "packs_dropped": played.num_drops,
                "pages": engine.device.info.num_pages,
            }
            rows.append(row)
            print(*(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def first_turns(lengths: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A conversation's later prompts hold all before them, so a shorter prompt begins another conversation."""
    return [own for before, own in pairwise(lengths) if own[0] < before[0]]


def joined(hardware: Hardware, number: int) -> Hardware:
    """Devices by tensor parallelism, as if they need not talk."""
    return replace(
        hardware,
        name=f"{number} x {hardware.name}",
        flops_per_s=number * hardware.flops_per_s,
        bytes_per_s=number * hardware.bytes_per_s,
        memory_bytes=number * hardware.memory_bytes,
    )


def _paper_ratio(setting: Setting, rate: int) -> float | None:
    ours, separate = setting.tuning.get(rate, (0.0, 0.0))
    return round(ours / separate, 2) if separate else None


def _share_evicted(played: Played) -> float:
    return played.num_evictions / max(1, len(played.outcomes))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


if __name__ == "__main__":
    main()
