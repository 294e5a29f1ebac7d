"""Figures of the papers that are measured on this machine: a backward pass that is suspended, and a window of weights
beside requests. To be run while nothing else runs.
"""

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.papers.harli import MICRO_BATCH, PHASE_S, PHASES
from benchmarks.papers.setting import ALL_LINEAR, Claim, Figure, Row, between
from coserve import Engine, EngineConfig, Example, TuningConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.models import load_backbone
from coserve.models.presets import PRESETS
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies.base import setting
from coserve.scheduling.policies.tuning_only import TuningOnly

# -- LLMStation, figure 12 --------------------------------------------------------------------

_SUSPENDS = (0, 1, 2, 5, 9, 14, 29)
_TURNS = 9


@dataclass(frozen=True, kw_only=True)
class _InTurns(TuningOnly):
    """Jobs alone, and in a step at most this many layers of a backward pass."""

    layers: int = setting(1, "Of a backward pass, in a step.")

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        made = super().plan(view, latency)
        tasklets = [structs.replace(each, num_tasklets=min(each.num_tasklets, self.layers)) for each in made.tasklets]
        return structs.replace(made, tasklets=tuple(tasklets))


def _suspended(length: int) -> list[Row]:
    """A backward pass of SmolLM2-135M (30 layers) on this machine, suspended after some of its layers."""
    backbone = load_backbone("dummy:smollm2-135m", dtype="float32")
    engine = Engine.from_backbone(backbone, EngineConfig(policy="tuning-only", memory_bytes=2 << 30))
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
    """One after the other, in a process that has the machine."""
    return _suspended(128) + _suspended(512)


def _backward_s(engine: Engine, layers: int) -> float:
    """Of the steps with the backward pass of the next pack."""
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


# -- HARLI, figure 13 -------------------------------------------------------------------------

# Tokens of prompts and answers, and the pool, which has room for most requests or for all weights.
_WINDOW_PROMPT, _WINDOW_OUTPUT, _POOL_BYTES = 300, 300, 720_000_000


def _window() -> list[Row]:
    """SmolLM2-135M serves, and a job trains a second copy of it, whose weights go through a
    window of the page pool.
    """
    backbone = load_backbone("dummy:smollm2-135m", dtype="bfloat16")
    with TemporaryDirectory() as folder:
        config = AutoConfig.for_model(**PRESETS["smollm2-135m"])
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
        engine = Engine.from_backbone(
            backbone,
            EngineConfig(memory_bytes=_POOL_BYTES, ttft_s=60.0, tpot_s=0.5, trainable_models={"second": folder}),
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
                for _ in range(number - len(engine.requests.running) - len(engine.requests.waiting)):
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
                owner: round(count * engine.pool.page_bytes / num_steps / 1e6, 1) for owner, count in pages.items()
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


FIGURES = {
    "llmstation-12": Figure(
        "a backward pass in parts, on this machine", lambda data: [partial(_both_lengths)], _claims_suspended
    ),
    "harli-13": Figure(
        "memory of requests and of a second model, on this machine", lambda data: [partial(_window)], _claims_13
    ),
}
