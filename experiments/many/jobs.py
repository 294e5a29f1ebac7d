"""Many jobs of short sequences at once, beside the same jobs one after another, and PEFT."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from coserve.bench.baselines import PeftTrainer
from coserve.bench.machine import now_s
from coserve.bench.train import LORA
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.errors import CoserveError
from coserve.models.backbone import Backbone
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from experiments.peak_memory import PeakMemory, peak_bytes

_MEMORY_BYTES = 4 << 30
_SEQUENCE = 64
# Optimizer steps of a job in each turn.
_STEPS = 2
# How far the loss of a job may be from that of its run alone, relatively: rounding, over a few
# optimizer steps.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def run(
    backbone: Backbone,
    *,
    runs: int,
    num_jobs: int = 8,
    batch: int = 4,
    steps: int = _STEPS,
    length: int = _SEQUENCE,
) -> dict[str, Any]:
    """Measure in turns: the jobs at once, one after another, one job with the batch of all, and
    PEFT, one after another.

    Each job runs `steps` optimizer steps on batches of `batch` sequences of `length` tokens, with a
    fresh LoRA; medians over `runs` turns, after one that warms up. Memory is the maximum beyond the
    weights: of all jobs at once, and of as many PEFT trainers as there are jobs.

    Raises:
        CoserveError: A job's losses at once are not those of its run alone.
    """
    engine = Engine.from_backbone(
        backbone, EngineConfig(policy="tuning-only", memory_bytes=_MEMORY_BYTES)
    )
    peft = PeftTrainer(backbone, LORA, TuningConfig().optimizer)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(
        backbone.architecture.vocab_size, (num_jobs, steps * batch, length), generator=generator
    )
    seconds: dict[str, list[float]] = {
        name: [] for name in ("at_once", "in_turn", "one_job", "peft")
    }
    difference = 0.0
    for _ in range(runs + 1):
        together = _train(engine, data, batch)
        alone = [
            _train(engine, data[job : job + 1], batch, first_seed=job) for job in range(num_jobs)
        ]
        difference = max(difference, _difference(together, alone))
        seconds["at_once"].append(together.seconds)
        seconds["in_turn"].append(sum(each.seconds for each in alone))
        seconds["one_job"].append(_train(engine, _as_one(data, batch), num_jobs * batch).seconds)
        seconds["peft"].append(_peft_s(peft, data.to(backbone.device), batch))
    if difference > _TOLERANCE[backbone.dtype]:
        raise CoserveError(
            f"losses of jobs at once are {difference:.1e} off those of their runs alone"
        )
    per_s = {name: data.numel() / median(each[1:]) for name, each in seconds.items()}
    return {
        "jobs": num_jobs,
        "batch": batch,
        "sequence": length,
        "tokens_per_s": per_s["at_once"],
        "one_after_another_tokens_per_s": per_s["in_turn"],
        "one_job_tokens_per_s": per_s["one_job"],
        "peft_sequential_tokens_per_s": per_s["peft"],
        "loss_difference": difference,
        **_memory(engine, peft, data, batch),
    }


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """Result of some jobs."""

    seconds: float
    """Seconds from the first step to the last optimizer step."""
    losses: list[list[float]]
    """Losses of each job, by optimizer step."""


def _train(
    engine: Engine,
    data: Tensor,
    batch: int,
    *,
    first_seed: int = 0,
    memory: PeakMemory | None = None,
) -> _Trained:
    """Train jobs at once.

    Args:
        engine: The engine.
        data: Token ids [jobs, sequences, length].
        batch: Sequences per optimizer step.
        first_seed: Seed of the first job.
        memory: Recorder of the bytes in the engine's pages, step by step.
    """
    device = torch.device(engine.device.info.device)
    jobs = [
        _submit(engine, sequences.tolist(), batch, first_seed + index)
        for index, sequences in enumerate(data)
    ]
    losses: dict[str, list[float]] = {job: [] for job in jobs}
    page_bytes = 0
    start_s = end_s = now_s(device)
    while engine.jobs.num_running:
        for event in engine.step():
            if isinstance(event, JobEvent) and event.kind == "step" and event.loss is not None:
                losses[event.job].append(event.loss)
                end_s = now_s(device)
        if memory is not None:
            before, page_bytes = (
                page_bytes,
                sum(engine.pool.num_pages_by_owner().values()) * engine.pool.page_bytes,
            )
            memory.held_elsewhere(max(before, page_bytes))
    for job in jobs:
        if engine.job(job).state != "succeeded":
            raise CoserveError(f"{job} has {engine.job(job).state}: {engine.job(job).error or ''}")
        engine.forget_job(job)
        engine.unload_adapter(job)
    return _Trained(seconds=end_s - start_s, losses=list(losses.values()))


def _submit(engine: Engine, sequences: Sequence[Sequence[int]], batch: int, seed: int) -> str:
    examples = [
        Example(tokens=tuple(tokens), trained=(True,) * len(tokens)) for tokens in sequences
    ]
    return engine.submit(
        examples, TuningConfig(batch_size=batch, shuffle=False, seed=seed), adapter=LORA
    )


def _as_one(data: Tensor, batch: int) -> Tensor:
    """Return the same sequences for one job, whose steps have those of all jobs' steps."""
    jobs, sequences, length = data.shape
    return data.view(jobs, sequences // batch, batch, length).transpose(0, 1).reshape(1, -1, length)


def _difference(together: _Trained, alone: Sequence[_Trained]) -> float:
    """Return the largest relative difference of a loss from that of the run alone."""
    pairs = [
        pair
        for ours, own in zip(together.losses, alone, strict=True)
        for pair in zip(ours, own.losses[0], strict=True)
    ]
    return max(abs(ours - own) / own for ours, own in pairs)


def _peft_s(peft: PeftTrainer, data: Tensor, batch: int) -> float:
    """Return the seconds of the jobs' optimizer steps, one job after another; with one adapter, as
    another takes as long.
    """
    return sum(peft.step_s(tokens) for sequences in data for tokens in sequences.split(batch))


def _memory(engine: Engine, peft: PeftTrainer, data: Tensor, batch: int) -> dict[str, int]:
    device = torch.device(engine.device.info.device)
    with PeakMemory(device) as ours:
        _train(engine, data[:, :batch], batch, memory=ours)
    tokens = data[0, :batch].to(device)
    theirs = peft.state_bytes() + peak_bytes(lambda: peft.step_s(tokens), device)
    return {"memory_bytes": ours.num_bytes, "peft_memory_bytes": data.shape[0] * theirs}
