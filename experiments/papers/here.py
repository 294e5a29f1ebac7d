"""Figures of the papers that are measured on this machine, which must be idle otherwise.

A backward pass that is suspended, HARLI's predictions of steps beside a job, and windows of weights
beside requests.
"""

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch
from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM

from coserve import Engine, EngineConfig, Example, TuningConfig
from coserve.bench.open_loop import OpenLoop
from coserve.devices.base import Device
from coserve.devices.messages.steps import StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.jobs.events import JobEvent
from coserve.engine.outbox import Event
from coserve.models import Backbone, load_backbone
from coserve.models.presets import PRESETS
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies.base import setting
from coserve.scheduling.policies.harli import Harli, predictor
from coserve.scheduling.policies.tuning_only import TuningOnly
from coserve.scheduling.slo import Slo
from coserve.workloads.summary import percentile
from coserve.workloads.traces import TracedRequest
from experiments.papers.harli import MICRO_BATCH, PHASE_S, PHASES
from experiments.papers.setting import ALL_LINEAR, Claim, Figure, Row, between

# -- LLMStation, figure 12 --------------------------------------------------------------------

_SUSPENDS = (0, 1, 2, 5, 9, 14, 29)
_TURNS = 9


@dataclass(frozen=True, kw_only=True)
class _InTurns(TuningOnly):
    """A policy of jobs alone, with a bounded number of layers of a backward pass per step."""

    layers: int = setting(1, "Of a backward pass, in a step.")
    """Maximum number of layers per step."""

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        planned = super().plan(view, latency)
        tasklets = [
            structs.replace(each, num_tasklets=min(each.num_tasklets, self.layers))
            for each in planned.tasklets
        ]
        return structs.replace(planned, tasklets=tuple(tasklets))


def _suspended(length: int) -> list[Row]:
    """Measure a backward pass of SmolLM2-135M (30 layers), suspended after some of its layers."""
    backbone = load_backbone("dummy:smollm2-135m", dtype="float32")
    engine = Engine.from_backbone(
        backbone, EngineConfig(policy="tuning-only", memory_bytes=2 << 30)
    )
    tuning = TuningConfig(num_epochs=10_000, batch_size=1, max_sequence_length=length)
    example = Example(tokens=(1,) * length, trained=(True,) * length)
    engine.submit([example] * 8, tuning, adapter=ALL_LINEAR)
    taken: dict[int, list[float]] = {number: [] for number in _SUSPENDS}
    for _ in range(1 + _TURNS):
        for number in _SUSPENDS:
            layers = -(-backbone.architecture.num_layers // (1 + number))
            taken[number].append(_backward_s(engine, layers))
    rows = []
    for number, seconds in taken.items():  # the first warms up
        longer = median(a / b for a, b in zip(seconds[1:], taken[0][1:], strict=True))
        rows.append(
            {
                "length": length,
                "suspends": number,
                "backward_ms": round(1e3 * median(seconds[1:]), 1),
                "of_without": round(longer, 4),
            }
        )
    return rows


def _both_lengths() -> list[Row]:
    """Measure both lengths one after the other, in a process that has the machine."""
    return _suspended(128) + _suspended(512)


def _backward_s(engine: Engine, layers: int) -> float:
    """Return the seconds of the steps with the backward pass of the next pack."""
    engine.policy = _InTurns(layers=layers)
    seconds, begun = 0.0, False
    while True:
        start_s = time.perf_counter()
        engine.step()
        took_s = time.perf_counter() - start_s
        if engine.last_plan is not None and engine.last_plan.tasklets:
            seconds, begun = seconds + took_s, True
        elif begun:
            return seconds


def _claims_suspended(rows: list[Row]) -> list[Claim]:
    longer = [row["of_without"] for row in rows if row["suspends"]]
    return [
        Claim(
            "a backward pass that is suspended, over one that is not",
            "less than 1.005 on one GPU",
            between(longer),
            max(longer) < 1.02,
        )
    ]


# -- HARLI, figure 12 ----------------------------------------------------------------------

# The first steps of each cell teach the latency model, not HARLI's predictor. In every second step
# requests are alone, on the whole device: what these take tells the pace of the machine from what
# the job beside takes.
_BATCHES, _CONTEXTS, _FIRST_STEPS, _STEPS = (1, 4, 8, 16), (128, 1024), 6, 16


@dataclass(frozen=True, kw_only=True)
class _BesideBackward(Harli):
    """A policy that runs jobs to their backward pass without requests, so that each measured decode
    step has one beside it.

    HARLI itself gives windows the time that decode steps leave over.
    """

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        serves = view.waiting or any(request.num_rows > 1 for request in view.requests)
        if serves or any(job.phase == "backward" for job in view.jobs):
            is_alone = min([request.num_output for request in view.requests], default=0) % 2
            return super().plan(structs.replace(view, jobs=()) if is_alone else view, latency)
        return structs.replace(
            TuningOnly().plan(view, latency), tasklets=()
        )  # what comes after a loss waits


class _Timed:
    """A device that also measures its last step."""

    def __init__(self, device: Device) -> None:
        self._device, self.info, self.clock = device, device.info, device.clock
        self.execute, self.submit, self.close = device.execute, device.submit, device.close
        self.result = StepResult(step=0)

    def collect(self) -> StepResult:
        self.result = self._device.collect()
        return self.result


def _predicted() -> list[Row]:
    """Measure decode steps of Qwen2.5-0.5B on a part of this machine, beside a job's backward pass
    on the rest.
    """
    backbone = load_backbone("dummy:qwen2.5-0.5b", dtype="bfloat16")
    timed: list[_Timed] = []

    def wrap(device: Device) -> Device:
        timed.append(_Timed(device))
        return timed[0]

    # With that long for a token, requests have the smallest part.
    engine = Engine.from_backbone(
        backbone, EngineConfig(memory_bytes=3 << 30, ttft_s=600.0, tpot_s=60.0), wrap=wrap
    )
    engine.policy = _BesideBackward()
    latency = LatencyModel(engine.device.info.profile)
    example = Example(tokens=(1,) * 512, trained=(True,) * 512)
    tuning = TuningConfig(num_epochs=10_000, batch_size=4, max_sequence_length=512)
    engine.submit([example] * 64, tuning, adapter=ALL_LINEAR)
    params, random, rows = (
        SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True),
        Random(0),
        [],
    )
    for batch, context in product(_BATCHES, _CONTEXTS):
        names = [
            engine.add_tokens(random.choices(range(1000), k=context), params) for _ in range(batch)
        ]
        errors: dict[str, list[float]] = {
            name: [] for name in ("two_stage", "at_pace", "profiled", "corrected")
        }
        pace = 1.0
        while len(errors["two_stage"]) < _FIRST_STEPS + _STEPS:
            engine.step()
            plan, took_s = engine.last_plan, timed[0].result.forward_s
            if plan is None or [row.kind for row in plan.rows] != ["decode"] * batch:
                continue
            held = mean([row.start for row in plan.rows])
            alone_s = latency.decode_s(num_requests=batch, context=round(held))
            if plan.partition is None:
                pace = took_s / alone_s
                continue
            predicted_s = predictor(latency).seconds(plan.partition, batch, held)
            speed, _ = latency.sharing.speeds(plan.partition, forward_rows=batch, tasklet_rows=512)
            for name, each_s in (
                ("two_stage", predicted_s),
                ("at_pace", pace * predicted_s),
                ("profiled", alone_s / speed),
                ("corrected", plan.prediction.forward_s / plan.prediction.forward_speed),
            ):
                errors[name].append(abs(each_s - took_s) / took_s)
        for name in names:
            engine.cancel(name)
        means = {name: round(mean(each[_FIRST_STEPS:]), 4) for name, each in errors.items()}
        rows.append({"requests": batch, "context": context, **means})
    return rows


def _claims_predicted(rows: list[Row]) -> list[Claim]:
    errors = {
        name: mean([row[name] for row in rows])
        for name in ("two_stage", "at_pace", "profiled", "corrected")
    }
    two_stage = errors.pop("two_stage")
    others = {
        "at_pace": (
            "the same, times what the step of requests alone just before took of its prediction"
        ),
        "profiled": "of the profile, without equation 2's lines",
        "corrected": "of the latency model, which steps correct",
    }
    return [
        Claim(
            "mean error of the two-stage predictor on co-run steps",
            "5%",
            f"{two_stage:.1%}",
            two_stage <= 0.05,
        ),
        *(Claim(words, "–", f"{errors[name]:.1%}", None) for name, words in others.items()),
    ]


# -- HARLI, figure 13 -------------------------------------------------------------------------

# Tokens of prompts and answers, and the pool, which has room for most requests or for all weights.
_WINDOW_PROMPT, _WINDOW_OUTPUT, _POOL_BYTES = 300, 300, 720_000_000


def _window() -> list[Row]:
    """Measure SmolLM2-135M serving while a job trains a second copy of it, whose weights go through
    a window of the page pool.
    """
    backbone = load_backbone("dummy:smollm2-135m", dtype="bfloat16")
    with TemporaryDirectory() as folder:
        config = AutoConfig.for_model(**PRESETS["smollm2-135m"])
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
        engine = Engine.from_backbone(
            backbone,
            EngineConfig(
                memory_bytes=_POOL_BYTES,
                ttft_s=60.0,
                tpot_s=0.5,
                trainable_models={"second": folder},
            ),
        )
        example = Example(tokens=(1,) * 256, trained=(True,) * 256)
        tuning = TuningConfig(num_epochs=100_000, batch_size=MICRO_BATCH, max_sequence_length=256)
        engine.submit([example] * 64, tuning, adapter=ALL_LINEAR, model="second")
        params = SamplingParams(max_tokens=_WINDOW_OUTPUT, temperature=0.0, ignore_eos=True)
        rows, random = [], Random(0)
        for number in PHASES:
            for request in list(engine.requests)[number:]:
                engine.cancel(request.request)
            pages: Counter[str] = Counter()
            start_s, before, num_steps = 0.0, 0, 0
            while not num_steps or time.monotonic() < start_s + PHASE_S:
                for _ in range(
                    number - len(engine.requests.running) - len(engine.requests.waiting)
                ):
                    engine.add_tokens(random.choices(range(1000), k=_WINDOW_PROMPT), params)
                engine.step()
                planned = engine.last_plan.rows if engine.last_plan is not None else ()
                if num_steps or sum(row.kind == "decode" for row in planned) >= number:
                    if not num_steps:
                        start_s, before = time.monotonic(), engine.stats().num_tokens_trained
                    num_steps += 1
                    pages.update(engine.pool.num_pages_by_owner())
            seconds = time.monotonic() - start_s
            trained = engine.stats().num_tokens_trained - before
            megabytes = {
                owner: round(count * engine.pool.page_bytes / num_steps / 1e6, 1)
                for owner, count in pages.items()
            }
            step_ms = round(1e3 * seconds / num_steps, 1)
            row = {"requests": number, **megabytes, "step_ms": step_ms}
            rows.append({**row, "tuning_tokens_per_s": round(trained / seconds, 1)})
    return rows


def _claims_13(rows: list[Row]) -> list[Claim]:
    light, heavy, medium = (row.get("weights", 0.0) for row in rows)
    return [
        Claim(
            "the window of weights follows what requests leave (light, heavy, medium)",
            "it does",
            f"{light}, {heavy}, {medium} MB",
            light > medium > heavy,
        )
    ]


# -- HARLI, section 6: a model that is larger than the free memory, beside requests with SLOs
# --------

# The pool: a third of the second model's weights. Sequences of the job, and their tokens.
_FREE_BYTES, _NUM_SEQUENCES, _SEQUENCE = 240_000_000, 96, 64
# Of SmolLM2-360M, beside those of SmolLM2-135M.
_LARGER = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
}
# Requests that come at random, for a minute at each rate.
_SERVED_PROMPT, _SERVED_OUTPUT, _SERVED_S, _SERVED_RATES = 128, 64, 60.0, (0.25, 0.5, 1.0)


def _served(rate: float) -> list[TracedRequest]:
    arrivals = accumulate(
        Random(0).expovariate(rate) for _ in range(int(2 * rate * _SERVED_S) + 20)
    )
    return [
        TracedRequest(at_s=at_s, num_prompt_tokens=_SERVED_PROMPT, num_output_tokens=_SERVED_OUTPUT)
        for at_s in arrivals
        if at_s < _SERVED_S
    ]


class _Remembering(Engine):
    """An engine that keeps the losses of its jobs' optimizer steps."""

    losses: list[float]
    """Losses of the optimizer steps."""

    def step(self) -> list[Event]:
        events = super().step()
        self.losses += [
            each.loss for each in events if isinstance(each, JobEvent) and each.loss is not None
        ]
        return events


def _remembering(backbone: Backbone, config: EngineConfig) -> _Remembering:
    engine = _Remembering.from_backbone(backbone, config)
    engine.losses = []
    return engine


def _finish(engine: _Remembering, job: str) -> None:
    while not engine.jobs[job].is_terminal:
        engine.step()


def _larger() -> list[Row]:
    """Measure SmolLM2-135M serving while SmolLM2-360M is trained: requests alone, beside the job,
    and the job alone.
    """
    backbone = load_backbone("dummy:smollm2-135m", dtype="bfloat16")
    random = Random(0)
    examples = [
        Example(tokens=tuple(random.choices(range(1000), k=_SEQUENCE)), trained=(True,) * _SEQUENCE)
        for _ in range(_NUM_SEQUENCES)
    ]
    tuning = TuningConfig(num_epochs=1, batch_size=4, max_sequence_length=_SEQUENCE)
    rows = []
    with TemporaryDirectory() as folder:
        config = AutoConfig.for_model(**PRESETS["smollm2-135m"] | _LARGER)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
        alone = _remembering(
            load_backbone(folder, dtype="bfloat16"), EngineConfig(memory_bytes=2 << 30)
        )
        _finish(alone, alone.submit(examples, tuning, adapter=ALL_LINEAR))
        served = Engine.from_backbone(backbone, EngineConfig(memory_bytes=_FREE_BYTES))
        solo_s = LatencyModel(served.device.info.profile).decode_s(
            num_requests=1, context=_SERVED_PROMPT
        )
        slo = Slo(ttft_s=5.0, tpot_s=2.5 * solo_s)
        for rate, policy in product(_SERVED_RATES, ("inference-only", "slack")):
            settings = EngineConfig(
                policy=policy, memory_bytes=_FREE_BYTES, trainable_models={"second": folder}
            )
            engine = _remembering(backbone, settings)
            job = engine.submit(examples, tuning, adapter=ALL_LINEAR, model="second")
            played = OpenLoop(
                engine, _served(rate), slo=slo, seconds=_SERVED_S, idle=time.sleep
            ).run(drain_s=30.0)
            tpots_s = [each.tpot_s for each in played.outcomes if each.tpot_s is not None]
            row: Row = {
                "policy": policy,
                "requests_per_s": rate,
                "requests": len(played.outcomes),
                "attainment": round(played.attainment(slo) or 0.0, 4),
                "tpot_p99_of_slo": round(percentile(tpots_s, 0.99) / slo.tpot_s, 3),
                "tuning_tokens_per_s": round(played.tuning_tokens_per_s, 1),
            }
            if policy != "inference-only":
                _finish(engine, job)
                pool_bytes = engine.pool.num_pages * engine.pool.page_bytes
                row["weights_over_pool"] = round(alone.device.info.weight_bytes / pool_bytes, 2)
                row["loss_difference"] = round(
                    max(abs(a / b - 1) for a, b in zip(engine.losses, alone.losses, strict=True)), 6
                )
            rows.append(row)
    return rows


def _claims_larger(rows: list[Row]) -> list[Claim]:
    alone, beside = (
        [row for row in rows if ("loss_difference" in row) == is_beside]
        for is_beside in (False, True)
    )
    difference = max(row["loss_difference"] for row in beside)
    times = min(row["weights_over_pool"] for row in beside)
    held = [
        row["attainment"] >= 0.99 for row in beside if _of_rate(alone, row)["attainment"] >= 0.99
    ]
    return [
        Claim(
            "weights of the trained model, over the free memory",
            "they need not fit",
            f"{times:.1f}",
            times >= 3,
        ),
        Claim(
            "attainment beside it, requests alone",
            "QoS is kept",
            ", ".join(
                f"{row['attainment']:.1%}, {_of_rate(alone, row)['attainment']:.1%}"
                for row in beside
            ),
            all(held) and bool(held),
        ),
        Claim(
            "losses, beside those of the same job with its model alone",
            "–",
            f"{difference:.2%}",
            None,
        ),
    ]


def _of_rate(rows: list[Row], like: Row) -> Row:
    return next(row for row in rows if row["requests_per_s"] == like["requests_per_s"])


FIGURES = {
    "llmstation-12": Figure(
        "a backward pass in parts, on this machine",
        lambda data: [partial(_both_lengths)],
        _claims_suspended,
    ),
    "harli-12": Figure(
        "what decode steps take beside a job, on this machine",
        lambda data: [partial(_predicted)],
        _claims_predicted,
    ),
    "harli-13": Figure(
        "memory of requests and of a second model, on this machine",
        lambda data: [partial(_window)],
        _claims_13,
    ),
    "harli-larger": Figure(
        "a model three times larger than the free memory, beside requests with SLOs",
        lambda data: [partial(_larger)],
        _claims_larger,
    ),
}
