"""Figures of FlexLLM, section 8, and its table of evictions (appendix B), on modelled A100s.

Four pipelines serve and fine-tune, each on 1, 2 or 4 A100s by the model. One of them is modelled,
which gets a quarter of the requests: Azure's arrivals with the lengths of ShareGPT's first turns;
LoRA of rank 16 on the down projections, sequences of 8,192 tokens. The paper's figure 13 is in
benchmarks/activation-memory.md.
"""

from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.open_loop import Played
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import A100
from coserve.simulate.links import NVLINK_3_MESH
from coserve.workloads.traces import TracedRequest
from experiments.papers.setting import (
    Claim,
    Data,
    Figure,
    Row,
    Setting,
    Task,
    between,
    p99_ms,
    ratio,
)

# A node of Perlmutter (section 8) has four A100 and no NVSwitch.
_PERLMUTTER = replace(A100, link=NVLINK_3_MESH)
_NUM_PIPELINES = 4
_LORA = LoraConfig(r=16, alpha=32, target_modules=("down_proj",))
_RATES = (4, 8, 12, 16, 20)
# Of the pipelines, those that serve where each does one thing.
_SPLITS = (1, 2, 3)
_CO_SERVING = ("slack", "token-fusion")
_SHARING = (
    *(f"temporal-sharing:n={number}" for number in (64, 128, 512)),
    "dynamic-temporal-sharing",
    "spatial-sharing",
    "spatial-sharing:inference_share=0.4",
)
# Requests per second of each 30 s of ten minutes, after the words of section 8.3: up to a peak
# after some 90 s, then down with some peaks.
_CASE_RATES = (
    2.0,
    4.0,
    7.0,
    9.0,
    8.0,
    5.0,
    6.5,
    4.0,
    5.5,
    3.0,
    4.0,
    2.5,
    2.0,
    3.5,
    2.0,
    1.5,
    2.0,
    1.5,
    1.0,
    1.0,
)
_CASE_STRETCH_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the paper."""

    name: str
    """Name of the model."""
    num_devices: int
    """Number of devices of a pipeline."""
    tpot_s: float
    """SLO: mean seconds per later token."""
    tuning: dict[int, tuple[float, float]]
    """The paper's tokens/s at 4 and at 20 requests/s, co-serving and with a pipeline of its own."""
    evictions: tuple[float, ...] = (0.0,) * 5
    """The paper's shares of evicted requests at the rates above."""

    def setting(self, num_pages: int | None = None, sequence: int = 8192) -> Setting:
        return Setting(
            model=self.name,
            hardware=_PERLMUTTER,
            num_ranks=self.num_devices,
            slo=Slo(ttft_s=5.0, tpot_s=self.tpot_s),
            lora=_LORA,
            sequence=sequence,
            num_pages=num_pages,
        )


# Separate tuning at 4 requests/s follows from section 8.1: 2.5 to 6.8 times less than co-serving.
_MODELS = (
    Model(
        name="llama-3.1-8b",
        num_devices=1,
        tpot_s=0.05,
        tuning={4: (9400, 3800), 20: (7200, 3800)},
    ),
    Model(
        name="qwen2.5-14b",
        num_devices=2,
        tpot_s=0.075,
        tuning={4: (3700, 1000), 20: (2200, 1000)},
    ),
    Model(
        name="qwen2.5-32b",
        num_devices=4,
        tpot_s=0.075,
        tuning={4: (3200, 500), 20: (2200, 500)},
        evictions=(0.0, 0.0, 0.0, 0.0029, 0.012),
    ),
)


def _co_served(model: Model, policies: tuple[str, ...], rate: float, data: Data) -> list[Row]:
    setting, trace = model.setting(), data.bursts(rate / _NUM_PIPELINES)
    rows = []
    for policy in policies:
        played = setting.run(policy, trace, data.seconds)
        rows.append(
            {
                "model": model.name,
                "rate": rate,
                "system": policy,
                "attainment": round(setting.attainment(played), 4),
                "inference_tokens_per_s": round(_NUM_PIPELINES * played.inference_tokens_per_s),
                "tuning_tokens_per_s": round(_NUM_PIPELINES * played.tuning_tokens_per_s),
                "evicted": round(played.num_evictions / max(1, len(played.outcomes)), 4),
            }
        )
    return rows


def _separate(model: Model, data: Data) -> list[Row]:
    setting, rows = model.setting(), []
    alone = setting.tuning_alone()
    for rate in _RATES:
        for serving in _SPLITS:
            played = setting.requests_alone(data.bursts(rate / serving), data.seconds)
            rows.append(
                {
                    "model": model.name,
                    "rate": rate,
                    "system": f"{serving} of {_NUM_PIPELINES} serve",
                    "attainment": round(setting.attainment(played), 4),
                    "inference_tokens_per_s": round(serving * played.inference_tokens_per_s),
                    "tuning_tokens_per_s": round((_NUM_PIPELINES - serving) * alone),
                }
            )
    return rows


def _tasks_10(data: Data) -> list[Task]:
    tasks: list[Task] = [partial(_separate, model, data) for model in _MODELS]
    return tasks + [
        partial(_co_served, model, _CO_SERVING, rate, data) for model in _MODELS for rate in _RATES
    ]


def _value(
    rows: list[Row], model: Model, rate: float, system: str, key: str = "tuning_tokens_per_s"
) -> float:
    [value] = [
        row[key]
        for row in rows
        if (row["model"], row["rate"], row["system"]) == (model.name, rate, system)
    ]
    return float(value)


def _claims_10(rows: list[Row]) -> list[Claim]:
    claims, split = [], f"3 of {_NUM_PIPELINES} serve"
    for model in _MODELS:
        at = {
            rate: [_value(rows, model, rate, each) for each in (*_CO_SERVING, split)]
            for rate in model.tuning
        }
        paper = {rate: ratio(*tuning) for rate, tuning in model.tuning.items()}
        ours = {rate: [ratio(each, found[-1]) for each in found[:-1]] for rate, found in at.items()}
        claims.append(
            Claim(
                f"{model.name}: tuning over that of 75% serving, 25% tuning, at 4 and 20 "
                f"requests/s",
                ", ".join(f"{each}" for each in paper.values()),
                ", ".join(" and ".join(f"{each}" for each in found) for found in ours.values())
                + f" ({' and '.join(_CO_SERVING)})",
                all((each or 0) > 1.9 for found in ours.values() for each in found),
            )
        )
        left = model.tuning[20][0] / model.tuning[4][0]
        own = [_value(rows, model, 20, each) / _value(rows, model, 4, each) for each in _CO_SERVING]
        claims.append(
            Claim(
                f"{model.name}: of the tuning at 4 requests/s, what is left at 20",
                f"{left:.2f}",
                " and ".join(f"{each:.2f}" for each in own),
                max(own) < 1,
            )
        )
    keys = [(model, rate) for model in _MODELS for rate in _RATES]
    attained = [_value(rows, *key, each, "attainment") for key in keys for each in _CO_SERVING]
    few = [_value(rows, model, 20, "1 of 4 serve", "attainment") for model in _MODELS]
    claims.append(
        Claim("attainment, co-serving", "at or above 0.9", between(attained), min(attained) >= 0.9),
    )
    claims.append(
        Claim(
            "attainment with a quarter of the pipelines at 20/s",
            "limited",
            between(few),
            max(few) < 0.9,
        ),
    )
    return claims


def _tasks_11(data: Data) -> list[Task]:
    systems = (*_CO_SERVING, *_SHARING)
    return [partial(_co_served, model, systems, rate, data) for model in _MODELS for rate in _RATES]


def _claims_11(rows: list[Row]) -> list[Claim]:
    keys = [(model, rate) for model in _MODELS for rate in _RATES]

    def tuning(system: str) -> list[float]:
        return [_value(rows, *key, system) for key in keys]

    def attained(system: str) -> list[float]:
        return [_value(rows, *key, system, "attainment") for key in keys]

    fused, often, usual = "token-fusion", "temporal-sharing:n=64", "temporal-sharing:n=128"
    # The paper names no share: that with which jobs train as it says.
    dynamic, spatial = "dynamic-temporal-sharing", "spatial-sharing:inference_share=0.4"
    of_fused = {
        each: [round(a / b, 2) for a, b in zip(tuning(each), tuning(fused), strict=True)]
        for each in (often, usual, dynamic, spatial, "slack")
    }
    over_dynamic = [round(1 / each, 2) for each in of_fused[dynamic] if each]
    heavy = [_value(rows, model, 20, spatial, "attainment") for model in _MODELS]
    heavy_fused = [_value(rows, model, 20, fused, "attainment") for model in _MODELS]
    return [
        Claim(
            "n = 64: most tuning of temporal sharing, least attainment",
            "SLOs suffer",
            f"attainment {between(attained(often))}, tuning {between(of_fused[often])} x "
            f"co-serving",
            mean(attained(often)) < mean(attained(usual))
            and mean(tuning(often)) > mean(tuning(usual)),
        ),
        Claim(
            "n = 128: attainment of co-serving, tuning over it",
            "0.57 to 0.86",
            f"{between(of_fused[usual])}, attainment {between(attained(usual))}",
            max(of_fused[usual]) < 1,
        ),
        Claim(
            "co-serving over dynamic temporal sharing",
            "1.0 to 1.7, whose attainment is above 0.9 in most cells",
            f"{between(over_dynamic)}, attainment {between(attained(dynamic))}",
            min(over_dynamic) >= 0.95,
        ),
        Claim(
            "spatial sharing: tuning near co-serving's",
            "comparable",
            between(of_fused[spatial]),
            min(of_fused[spatial]) > 0.8,
        ),
        Claim(
            "spatial sharing: attainment below co-serving's at 20/s",
            "below",
            f"{between(heavy)} against {between(heavy_fused)}",
            mean(heavy) < mean(heavy_fused),
        ),
        Claim("slack over token-fusion (not in the paper)", "", between(of_fused["slack"]), None),
    ]


def _case(data: Data) -> list[Row]:
    """Run figure 12: ten minutes with a peak, in stretches of 30 s."""
    setting, start_s, trace = _MODELS[1].setting(), 0.0, list[TracedRequest]()
    for rate in _CASE_RATES:
        stretch = data.bursts(rate, seconds=_CASE_STRETCH_S, skip=len(trace))
        trace += [replace(each, at_s=start_s + each.at_s) for each in stretch]
        start_s += _CASE_STRETCH_S
    rows = []
    for policy in _CO_SERVING:
        played = setting.run(policy, trace, start_s)
        trained = [0.0]
        for index, rate in enumerate(_CASE_RATES):
            end_s = (index + 1) * _CASE_STRETCH_S
            trained.append(
                max(sample.num_trained for sample in played.samples if sample.at_s <= end_s)
            )
            rows.append(
                {
                    "system": policy,
                    "from_s": end_s - _CASE_STRETCH_S,
                    "rate": rate,
                    "inference_tokens_per_s": round(
                        _answered(played, end_s - _CASE_STRETCH_S, end_s)
                    ),
                    "tuning_tokens_per_s": round((trained[-1] - trained[-2]) / _CASE_STRETCH_S),
                    "attainment": round(setting.attainment(played), 4),
                    "tpot_p99_ms": p99_ms(played, "tpot_s"),
                }
            )
    return rows


def _answered(played: Played, start_s: float, end_s: float) -> float:
    """Return the tokens/s of prompts and answers in a stretch, as if each request's tokens came
    evenly.
    """
    num_tokens = 0.0
    for each in played.outcomes:
        inside_s = min(each.end_s, end_s) - max(each.arrival_s, start_s)
        if inside_s > 0:
            num_tokens += (
                (each.num_prompt_tokens + each.num_output_tokens)
                * inside_s
                / (each.end_s - each.arrival_s)
            )
    return num_tokens / (end_s - start_s)


def _claims_12(rows: list[Row]) -> list[Claim]:
    claims = []
    for policy in _CO_SERVING:
        own = [row for row in rows if row["system"] == policy]
        inference = [row["inference_tokens_per_s"] for row in own]
        by_load = sorted(own, key=lambda row: float(row["inference_tokens_per_s"]))
        quiet, busy = (
            mean(row["tuning_tokens_per_s"] for row in part) for part in (by_load[:5], by_load[-5:])
        )
        claims.append(
            Claim(
                f"{policy}: inference follows the load, tuning makes room",
                "from a few hundred to 2,250 tokens/s",
                f"{between(inference)} tokens/s, tuning {quiet:.0f} in the quietest and {busy:.0f} "
                f"in the busiest 150"
                f" s, attainment {own[0]['attainment']}",
                max(inference) > 3 * min(inference) and busy < quiet,
            )
        )
    return claims


# Pages of 16 tokens, and tokens of the job's sequences: half of what the device has, and so few
# that the pages of the requests at the highest rates are more than all of them.
_SCARCE = ((13_000, 8192), (3_000, 1024), (2_000, 1024), (1_500, 1024))


def _evictions(model: Model, scarce: tuple[int, int] | None, data: Data) -> list[Row]:
    setting, rows = model.setting(*(scarce or ())), []
    policies = (*_CO_SERVING, "inference-only") if scarce else _CO_SERVING
    for rate, paper in zip((*_RATES, 28), (*model.evictions, None), strict=True):
        for policy in policies:
            played = setting.run(policy, data.bursts(rate / _NUM_PIPELINES), data.seconds)
            rows.append(
                {
                    "model": model.name,
                    "pages": scarce[0] if scarce else None,
                    "rate": rate,
                    "system": policy,
                    "attainment": round(setting.attainment(played), 4),
                    "ttft_p99_ms": p99_ms(played, "ttft_s"),
                    "tpot_p99_ms": p99_ms(played, "tpot_s"),
                    "tuning_tokens_per_s": round(_NUM_PIPELINES * played.tuning_tokens_per_s),
                    "evicted": round(played.num_evictions / max(1, len(played.outcomes)), 4),
                    "paper_evicted": None if scarce else paper,
                    "packs_dropped": played.num_drops,
                }
            )
    return rows


def _tasks_evictions(data: Data) -> list[Task]:
    tasks: list[Task] = [partial(_evictions, model, None, data) for model in _MODELS]
    return [*tasks, *(partial(_evictions, _MODELS[0], scarce, data) for scarce in _SCARCE)]


def _claims_evictions(rows: list[Row]) -> list[Claim]:
    evicted = [row["evicted"] for row in rows if row["pages"] is None]
    return [
        Claim(
            "requests evicted",
            "none, but 0.0029 and 0.012 for 32B at 16 and 20/s",
            between(evicted),
            max(evicted) <= 0.012,
        )
    ]


FIGURES = {
    "flexllm-10": Figure("co-serving against separate pipelines", _tasks_10, _claims_10),
    "flexllm-11": Figure("co-serving against temporal and spatial sharing", _tasks_11, _claims_11),
    "flexllm-12": Figure(
        "ten minutes with a peak, Qwen2.5-14B", lambda data: [partial(_case, data)], _claims_12
    ),
    "flexllm-evictions": Figure(
        "evictions by load (appendix B)", _tasks_evictions, _claims_evictions
    ),
}
