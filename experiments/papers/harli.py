"""Figures of HARLI, section 8, on modelled RTX 6000 Ada and A100 (40 GB): instances that decode,
and a job beside them.

Two devices, prompts computed elsewhere, a TPOT of 40 ms, Azure's conversations as recorded (5.5
requests/s). Separate: one device decodes, the other fine-tunes. Static: both do both, requests on
60% of a device and half of the load, as processes of their own. HARLI: both do both, divided by the
load. Modelled jobs train the served model, from its one copy of the weights: where HARLI moves a
second model in and out through a window, nothing is moved here. Figure 13, which shows that window,
is in `here`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from statistics import mean

from coserve import Example, TuningConfig
from coserve.bench.open_loop import Played
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.request_queue import ImportedBlocks
from coserve.engine.token_engine import TokenEngine
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import A100_40GB, ADA6000, Hardware
from coserve.workloads.summary import percentile
from coserve.workloads.traces import TracedRequest
from experiments.papers.setting import (
    ALL_LINEAR,
    Claim,
    Data,
    Figure,
    Row,
    Setting,
    Task,
    between,
    ratio,
)

_MODELS = ("llama-3.1-8b", "qwen2.5-7b")
_DEVICES = (ADA6000, A100_40GB)
_SLO = Slo(ttft_s=5.0, tpot_s=0.04)
_NUM_DEVICES, _STATIC_UNITS = 2, 6
_BASELINE_BATCH, MICRO_BATCH = 16, 2
# Requests that decode at once in figures 13 and 14, for as many seconds each.
PHASES, PHASE_S = (8, 42, 24), 30.0


def _setting(model: str, hardware: Hardware, batch: int, num_ranks: int = 1) -> Setting:
    return Setting(
        model=model, hardware=hardware, num_ranks=num_ranks, slo=_SLO, batch=batch, handed_over=True
    )


def _decoded(data: Data) -> list[TracedRequest]:
    """Return requests whose prompts arrive whole: all blocks, and the token that the first step
    reads.
    """
    block = 16
    return [
        replace(each, num_prompt_tokens=block * max(1, round(each.num_prompt_tokens / block)) + 1)
        for each in data.conversations()
        if each.at_s < data.seconds
    ]


def _half(trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Return the requests of one of two devices."""
    return list(trace[::_NUM_DEVICES])


def _throughput(model: str, hardware: Hardware, data: Data) -> list[Row]:
    trace = _decoded(data)
    whole, micro = (_setting(model, hardware, batch) for batch in (_BASELINE_BATCH, MICRO_BATCH))
    found: dict[str, tuple[Played, float]] = {
        "separate": (whole.requests_alone(trace, data.seconds), whole.tuning_alone())
    }
    requests, jobs = whole.on_parts(_STATIC_UNITS)
    found["static"] = (
        requests.requests_alone(_half(trace), data.seconds),
        _NUM_DEVICES * jobs.tuning_alone(),
    )
    for policy in ("harli", "slack"):
        played = micro.run(policy, _half(trace), data.seconds)
        found[policy] = played, _NUM_DEVICES * played.tuning_tokens_per_s
    return [
        {
            "device": hardware.name,
            "model": model,
            "system": system,
            "tuning_tokens_per_s": round(tuning),
            "attainment": round(whole.attainment(played), 4),
            **{f"tpot_p{share}_ms": _tpot_ms(played, share) for share in (50, 90, 99)},
            "prediction_error": None
            if played.prediction_error is None
            else round(played.prediction_error, 4),
            "prediction_error_p95": round(percentile(played.errors, 0.95), 4),
        }
        for system, (played, tuning) in found.items()
    ]


def _tpot_ms(played: Played, share: int) -> float | None:
    values = [each.tpot_s for each in played.outcomes if each.tpot_s is not None]
    return round(1e3 * percentile(values, share / 100), 1) if values else None


def _tasks(data: Data) -> list[Task]:
    return [
        partial(_throughput, model, hardware, data) for hardware in _DEVICES for model in _MODELS
    ]


def _of(rows: list[Row], system: str, over: str) -> dict[str, list[float]]:
    """Return the ratios of the tuning throughput of one system over another, by device, for each
    model.
    """
    tuning = {
        (row["device"], row["model"], row["system"]): row["tuning_tokens_per_s"] for row in rows
    }
    return {
        hardware.name: [
            ratio(tuning[hardware.name, model, system], tuning[hardware.name, model, over]) or 0.0
            for model in _MODELS
        ]
        for hardware in _DEVICES
    }


def _claims_11(rows: list[Row]) -> list[Claim]:
    ada = ADA6000.name
    over_separate, over_static = _of(rows, "harli", "separate"), _of(rows, "harli", "static")
    static = _of(rows, "static", "separate")
    attained = [row["attainment"] for row in rows if row["system"] == "harli"]
    return [
        Claim(
            "RTX 6000 Ada: HARLI over separate devices",
            "1.46 in the mean, up to 1.92",
            between(over_separate[ada]),
            min(over_separate[ada]) > 1,
        ),
        Claim(
            "RTX 6000 Ada: HARLI over static shares",
            "1.75 in the mean, up to 2.2",
            between(over_static[ada]),
            min(over_static[ada]) > 1,
        ),
        Claim(
            "HARLI gains less on the A100",
            "it does",
            f"over separate devices {between(over_separate[A100_40GB.name])}",
            mean(over_separate[A100_40GB.name]) < mean(over_separate[ada]),
        ),
        Claim(
            "A100: static shares over separate devices",
            "below 1",
            between(static[A100_40GB.name]),
            max(static[A100_40GB.name]) < 1,
        ),
        Claim(
            "HARLI holds the TPOT SLO", "for all requests", between(attained), min(attained) >= 0.99
        ),
        Claim(
            "slack over HARLI (not in the paper)",
            "",
            between([each for own in _of(rows, "slack", "harli").values() for each in own]),
            None,
        ),
    ]


def _claims_12(rows: list[Row]) -> list[Claim]:
    alone = [row["prediction_error"] for row in rows if row["system"] == "separate"]
    beside = [row["prediction_error"] for row in rows if row["system"] in ("harli", "slack")]
    return [
        Claim(
            "error of predicted steps, requests alone",
            "0.02 in the mean",
            between(alone),
            max(alone) < 0.04,
        ),
        Claim(
            "error of predicted steps beside a job",
            "below 0.05",
            between(beside),
            max(beside) < 0.05,
        ),
    ]


# -- figure 14 --------------------------------------------------------------------------------


def _phases(policy: str, data: Data) -> list[Row]:
    """Run phases of constant numbers of requests that decode; each that ends is followed by
    another.
    """
    bench = _setting(_MODELS[0], ADA6000, MICRO_BATCH).bench(data.seconds)
    engine = bench.place.open(EngineConfig(policy=policy, ttft_s=_SLO.ttft_s, tpot_s=_SLO.tpot_s))
    example = Example(tokens=(1,) * 512, trained=(True,) * 512)
    tuning = TuningConfig(num_epochs=100_000, batch_size=MICRO_BATCH)
    engine.submit_examples([example] * 64, tuning, adapter=ALL_LINEAR)
    lengths = iter(
        (each.num_prompt_tokens, each.num_output_tokens)
        for each in _decoded(replace(data, seconds=inf))
    )
    rows = []
    for index, number in enumerate(PHASES):
        end_s, before = (index + 1) * PHASE_S, engine.jobs.num_tokens_trained
        steps_s, units, used = [], [], []
        for request in list(engine.requests)[number:]:
            engine.cancel(request.request)
        while (start_s := engine.device.clock.now()) < end_s:
            for _ in range(number - len(engine.requests.running) - len(engine.requests.waiting)):
                _ask(engine, *next(lengths))
            engine.step()
            plan, took_s = engine.last_plan, engine.device.clock.now() - start_s
            if any(each.kind == "decode" for each in plan.rows):
                steps_s.append(took_s)
                total = engine.device.info.num_units
                units.append(plan.partition.forward_units if plan.partition is not None else total)
            used.append(_pages(engine))
        rows.append(
            {
                "system": policy,
                "requests": number,
                "units": round(mean(units), 2),
                "units_most": max(units),
                "step_p50_ms": round(1e3 * percentile(steps_s, 0.5), 1),
                "step_p99_ms": round(1e3 * percentile(steps_s, 0.99), 1),
                "pages": round(mean(used)),
                "tuning_tokens_per_s": round((engine.jobs.num_tokens_trained - before) / PHASE_S),
            }
        )
    return rows


def _pages(engine: TokenEngine) -> int:
    """Return the pages of the running requests."""
    block = engine.device.info.block_tokens
    return sum(-(-len(request.tokens) // block) for request in engine.requests.running.values())


def _ask(engine: TokenEngine, num_prompt_tokens: int, num_output_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    name = engine.add_tokens([1] * num_prompt_tokens, params, slo=_SLO)
    engine.hold(name)
    num_blocks = (num_prompt_tokens - 1) // engine.device.info.block_tokens
    engine.arrive(name, ImportedBlocks(path="", first_block=0, num_blocks=num_blocks))


def _claims_14(rows: list[Row]) -> list[Claim]:
    light, heavy, medium = (row for row in rows if row["system"] == "harli")
    return [
        Claim(
            "units of requests follow the load (light, heavy, medium)",
            "they do",
            f"{light['units']}, {heavy['units']}, {medium['units']} of 10",
            light["units"] < medium["units"] < heavy["units"],
        ),
        Claim(
            "decode steps stay near the SLO of 40 ms",
            "they do",
            f"p50 {light['step_p50_ms']}, {heavy['step_p50_ms']}, {medium['step_p50_ms']} ms",
            all(0.6 * 40 < row["step_p50_ms"] <= 40 for row in (light, heavy, medium)),
        ),
        Claim(
            "memory of requests follows the load",
            "it does",
            f"{light['pages']}, {heavy['pages']}, {medium['pages']} pages",
            light["pages"] < medium["pages"] < heavy["pages"],
        ),
    ]


# -- section 8.7 ------------------------------------------------------------------------------


def _tensor_parallel(model: str, hardware: Hardware, data: Data) -> list[Row]:
    """Run both devices as one group with one copy of the weights, beside HARLI on each and beside
    separate ones.
    """
    trace, rows = _decoded(data), []
    whole, micro = (_setting(model, hardware, batch) for batch in (_BASELINE_BATCH, MICRO_BATCH))
    group = _setting(model, hardware, _NUM_DEVICES * MICRO_BATCH, _NUM_DEVICES)
    found: dict[str, tuple[Played, float]] = {
        "separate": (whole.requests_alone(trace, data.seconds), whole.tuning_alone())
    }
    for policy in ("harli", "slack"):
        played = micro.run(policy, _half(trace), data.seconds)
        found[policy] = played, _NUM_DEVICES * played.tuning_tokens_per_s
        played = group.run(policy, trace, data.seconds)
        found[f"{policy}-tp"] = played, played.tuning_tokens_per_s
    for system, (played, tuning) in found.items():
        rows.append(
            {
                "device": hardware.name,
                "model": model,
                "system": system,
                "tuning_tokens_per_s": round(tuning),
                "attainment": round(whole.attainment(played), 4),
                **{f"tpot_p{share}_ms": _tpot_ms(played, share) for share in (50, 99)},
            }
        )
    return rows


def _claims_tensor_parallel(rows: list[Row]) -> list[Claim]:
    def claim(system: str, over: str, paper: str) -> Claim:
        by_device = _of(rows, system, over)
        ours = "; ".join(f"{device} {between(found)}" for device, found in by_device.items())
        return Claim(
            f"{system} over {over}",
            paper,
            ours,
            min(map(min, by_device.values())) > 1 if paper else None,
        )

    attained = [row["attainment"] for row in rows if row["system"] == "harli-tp"]
    return [
        claim("harli-tp", "harli", "1.102 in the mean"),
        claim("harli-tp", "separate", "1.33 in the mean"),
        Claim(
            "HARLI-TP holds the TPOT SLO",
            "for all requests",
            between(attained),
            min(attained) >= 0.99,
        ),
        claim("slack-tp", "slack", ""),
        claim("slack-tp", "harli-tp", ""),
    ]


FIGURES = {
    "harli-11": Figure(
        "tuning beside decoding (and figure 12's errors)",
        _tasks,
        lambda rows: _claims_11(rows) + _claims_12(rows),
    ),
    "harli-tp": Figure(
        "two devices as one group (section 8.7)",
        lambda data: [
            partial(_tensor_parallel, model, each, data) for each in _DEVICES for model in _MODELS
        ],
        _claims_tensor_parallel,
    ),
    "harli-14": Figure(
        "a load that changes",
        lambda data: [partial(_phases, policy, data) for policy in ("harli", "slack")],
        _claims_14,
    ),
}
