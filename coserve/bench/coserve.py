"""Measurement of co-serving: steady streams that decode with an SLO, and jobs in the time that they
leave over.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from typing import Any

import torch

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.baselines import PeftTrainer
from coserve.bench.train import LORA
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.records import RequestRecord
from coserve.engine.request import Chunk
from coserve.models.backbone import Backbone
from coserve.scheduling.policies import make_policy
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.workloads.summary import percentile

_MEMORY_BYTES = 4 << 30
_TTFT_S = 2.0
# SLO of a stream, in steps in which the streams decode alone.
_OBJECTIVE_STEPS = 2.5
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 64
_SEQUENCE = 512


@dataclass(kw_only=True)
class _Phase:
    """Result of one policy."""

    records: list[RequestRecord] = field(default_factory=list)
    """Records of the requests."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of steps in which all streams decode and nothing else runs."""
    errors: list[float] = field(default_factory=list)
    """Prediction errors of steps, as shares of their times."""
    num_tokens_trained: float = 0.0
    """Tokens trained, forward and backward each counting half."""
    num_tuning_steps: int = 0
    """Number of steps with work of jobs."""
    num_divided_steps: int = 0
    """Number of steps in which jobs ran beside requests on units of their own."""
    seconds: float = 0.0
    """Length of the phase."""

    @property
    def tuning_tokens_per_s(self) -> float:
        return self.num_tokens_trained / self.seconds

    def tpot_ms(self, share: float) -> float:
        return 1e3 * percentile(
            [record.tpot_s for record in self.records if record.tpot_s is not None], share
        )

    def ttft_ms(self, share: float) -> float:
        return 1e3 * percentile([record.ttft_s for record in self.records], share)

    @property
    def attainment(self) -> float:
        held = [record.attained for record in self.records]
        return sum(held) / len(held) if held else float("nan")

    def tpot_of_slo(self, share: float) -> float:
        """Return a percentile of TPOTs, each as a share of its request's SLO, which every turn sets
        anew.
        """
        tpots = [(record.tpot_s, record.asked_slo or record.slo) for record in self.records]
        return percentile(
            [tpot_s / slo.tpot_s for tpot_s, slo in tpots if tpot_s is not None], share
        )

    def add(self, turn: "_Phase") -> None:
        """Add another turn."""
        self.records += turn.records
        self.step_s += turn.step_s
        self.errors += turn.errors
        self.num_tokens_trained += turn.num_tokens_trained
        self.num_tuning_steps += turn.num_tuning_steps
        self.num_divided_steps += turn.num_divided_steps
        self.seconds += turn.seconds


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """Results of an engine over all turns."""

    solo_s: list[float]
    """Seconds of a step in which the streams decode alone, by turn."""
    alone: _Phase
    """Streams alone."""
    both: _Phase
    """Streams with jobs."""
    jobs: _Phase
    """Jobs alone."""
    in_turns: _Phase | None
    """Streams with jobs, but never side by side; None if the device cannot be divided."""


def run(
    backbone: Backbone,
    *,
    runs: int,
    streams: int = 4,
    num_jobs: int = 1,
    seconds: float = 60.0,
    dropout: float = 0.0,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Measure in turns: the streams alone, the streams with jobs, the jobs alone, and PEFT alone.

    The SLO of each turn is set from its streams alone: a machine that others use is not as fast in
    every turn.

    Args:
        backbone: The model.
        runs: Number of turns.
        streams: Number of requests that decode at once.
        num_jobs: Number of jobs.
        seconds: Time for each policy, divided among its turns.
        dropout: Dropout of the LoRAs of all sides.
        deterministic: Whether to add one turn on a deterministic engine, and what that costs.
    """
    peft_s: list[float] = []
    lora = replace(LORA, dropout=dropout)
    peft = PeftTrainer(backbone, lora, TuningConfig().optimizer)
    tokens = torch.randint(backbone.architecture.vocab_size, (1, _SEQUENCE), device=backbone.device)
    peft.step_s(tokens)

    def train_peft(for_s: float) -> None:
        until_s = time.perf_counter() + for_s
        while time.perf_counter() < until_s:
            peft_s.append(peft.step_s(tokens))

    def make_bench(*, is_deterministic: bool) -> _Bench:
        config = EngineConfig(
            memory_bytes=_MEMORY_BYTES, ttft_s=_TTFT_S, deterministic=is_deterministic
        )
        return _Bench(
            Engine.from_backbone(backbone, config), lora, streams=streams, num_jobs=num_jobs
        )

    turns = _measure(make_bench(is_deterministic=False), train_peft, runs=runs, seconds=seconds)
    result = {
        "streams": streams,
        "jobs": num_jobs,
        **_numbers(turns),
        "peft_alone_tokens_per_s": _SEQUENCE / median(peft_s),
        "prediction_error_median": percentile(turns.both.errors, 0.5),
        "prediction_error_p95": percentile(turns.both.errors, 0.95),
    }
    if deterministic:
        bench = make_bench(is_deterministic=True)
        turn = _measure(bench, lambda for_s: None, runs=1, seconds=seconds / runs)
        result["deterministic"] = _with_cost(_numbers(turn), result)
    return result


def _measure(
    bench: "_Bench", after_turn: Callable[[float], None], *, runs: int, seconds: float
) -> _Turns:
    """Run all policies in turns.

    Args:
        bench: Engine with streams and jobs.
        after_turn: Function that does something else for some seconds, after each turn of all
            policies.
        runs: Number of turns.
        seconds: Time for each policy.
    """
    # A loose SLO until the step is known, of which it is a multiple.
    bench.slo = Slo(ttft_s=_TTFT_S, tpot_s=_TTFT_S)
    bench.slo = _slo(median(bench.phase("inference-only", seconds / 4).step_s))
    # The latency model sees both kinds of step before anything counts.
    bench.phase("slack", seconds / 4)
    solo_s, alone, both, jobs = [], _Phase(), _Phase(), _Phase()
    in_turns = _Phase() if bench.can_be_divided else None
    for _ in range(runs):
        turn = bench.phase("inference-only", seconds / runs)
        solo_s.append(median(turn.step_s))
        bench.slo = _slo(solo_s[-1])
        alone.add(turn)
        both.add(bench.phase("slack", seconds / runs))
        if in_turns is not None:
            in_turns.add(bench.phase("slack", seconds / runs, divides=False))
        jobs.add(bench.phase("tuning-only", seconds / runs / 2))
        after_turn(seconds / runs / 2)
    return _Turns(solo_s=solo_s, alone=alone, both=both, jobs=jobs, in_turns=in_turns)


def _slo(solo_s: float) -> Slo:
    return Slo(ttft_s=_TTFT_S, tpot_s=_OBJECTIVE_STEPS * solo_s)


def _numbers(turns: _Turns) -> dict[str, Any]:
    both, alone = turns.both, turns.alone
    return {
        "objective_tpot_ms": 1e3 * _OBJECTIVE_STEPS * median(turns.solo_s),
        "objective_ttft_ms": 1e3 * _TTFT_S,
        "solo_step_ms": 1e3 * median(turns.solo_s),
        "solo_steps_ms": [1e3 * each for each in turns.solo_s],
        "tpot_p50_ms": both.tpot_ms(0.5),
        "tpot_p99_ms": both.tpot_ms(0.99),
        "tpot_p99_of_objective": both.tpot_of_slo(0.99),
        "ttft_p99_ms": both.ttft_ms(0.99),
        "attainment": both.attainment,
        "requests": len(both.records),
        "tuning_tokens_per_s": both.tuning_tokens_per_s,
        "inference_only_tpot_p50_ms": alone.tpot_ms(0.5),
        "inference_only_tpot_p99_ms": alone.tpot_ms(0.99),
        "inference_only_ttft_p50_ms": alone.ttft_ms(0.5),
        "inference_only_ttft_p99_ms": alone.ttft_ms(0.99),
        "inference_only_attainment": alone.attainment,
        "tuning_only_tokens_per_s": turns.jobs.tuning_tokens_per_s,
        **_divided(turns),
    }


def _divided(turns: _Turns) -> dict[str, Any]:
    """Return the share of divided steps among those with work of jobs, and what is reached without
    dividing.
    """
    both, in_turns = turns.both, turns.in_turns
    if in_turns is None:
        return {}
    return {
        "divided_share": both.num_divided_steps / max(1, both.num_tuning_steps),
        "in_turns_tokens_per_s": in_turns.tuning_tokens_per_s,
        "in_turns_tpot_p99_of_objective": in_turns.tpot_of_slo(0.99),
        "in_turns_attainment": in_turns.attainment,
    }


def _with_cost(numbers: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return results with the cost of a decode step, a prompt (TTFT alone) and a trained token, in
    times the default's.
    """
    times = {
        name: numbers[name] / default[name]
        for name in ("solo_step_ms", "inference_only_ttft_p50_ms")
    }
    trained = default["tuning_only_tokens_per_s"] / numbers["tuning_only_tokens_per_s"]
    return {
        **numbers,
        "cost_decode": times["solo_step_ms"],
        "cost_prompt": times["inference_only_ttft_p50_ms"],
        "cost_training": trained,
    }


class _Bench:
    """An engine whose streams never end: each finished request is followed by the next."""

    def __init__(self, engine: Engine, lora: LoraConfig, *, streams: int, num_jobs: int) -> None:
        self._engine, self._streams, self._random = engine, streams, Random(0)
        vocab_size = engine.device.info.vocab_size
        for index in range(num_jobs):
            rows = [self._random.choices(range(vocab_size), k=_SEQUENCE) for _ in range(64)]
            examples = [
                Example(tokens=tuple(tokens), trained=(True,) * _SEQUENCE) for tokens in rows
            ]
            config = TuningConfig(
                num_epochs=100_000, batch_size=4, max_sequence_length=_SEQUENCE, seed=index
            )
            engine.submit(examples, config, adapter=lora)

    @property
    def slo(self) -> Slo:
        """Return the SLO of the streams."""
        return self._engine.slo

    @slo.setter
    def slo(self, slo: Slo) -> None:
        self._engine.slo = slo

    @property
    def can_be_divided(self) -> bool:
        return self._engine.device.info.num_units > 1

    def phase(self, policy: str, seconds: float, **settings: Any) -> _Phase:
        """Run a policy for some seconds, and return its result."""
        phase, engine = _Phase(), self._engine
        engine.policy = make_policy(policy, settings)
        num_open = 0
        serves, num_trained = policy != "tuning-only", self._num_trained()
        engine.records.clear()
        start_s = now_s = time.perf_counter()
        counted = False
        while now_s - start_s < seconds or num_open:
            if now_s - start_s >= seconds and not counted:  # after that, streams only end
                counted = True
                phase.num_tokens_trained += self._num_trained() - num_trained
                phase.seconds += now_s - start_s
            if serves and not counted:
                while num_open < self._streams:
                    self._arrive()
                    num_open += 1
            before_s = now_s
            for event in engine.step():
                num_open -= isinstance(event, Chunk) and event.finish_reason is not None
            now_s = time.perf_counter()
            plan = engine.last_plan
            if plan.runs_nothing:
                continue
            phase.num_tuning_steps += bool(plan.moved_jobs)
            phase.num_divided_steps += plan.partition is not None
            phase.errors.append(abs(plan.predicted_s - (now_s - before_s)) / (now_s - before_s))
            if all(rows.kind == "decode" for rows in plan.rows) and len(plan.rows) == self._streams:
                phase.step_s.append(now_s - before_s)
        phase.records += engine.records
        if not counted:
            phase.num_tokens_trained += self._num_trained() - num_trained
            phase.seconds += now_s - start_s
        return phase

    def _arrive(self) -> None:
        prompt = self._random.choices(range(self._engine.device.info.vocab_size), k=_PROMPT_TOKENS)
        # Lengths differ, so that the streams do not end at the same time.
        length = self._random.randint(_OUTPUT_TOKENS // 2, _OUTPUT_TOKENS * 3 // 2)
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        self._engine.add_tokens(prompt, params, slo=self.slo)

    def _num_trained(self) -> float:
        """Return the tokens that jobs have run, forward and backward each counting half: a phase
        may end within a pack.
        """
        return sum(job.num_rows_run for job in self._engine.jobs.values()) / 2
