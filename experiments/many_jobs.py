"""Eight fine-tuning jobs of short sequences at once, beside the same jobs one after another, and
one job with the batch of all.

    python -m experiments.many_jobs

Medians over turns; the last line is JSON.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.machine import now_s
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from experiments.results import add_save_option, print_result

LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")


def run(
    engine: Engine, num_jobs: int, batch_size: int, length: int, turns: int
) -> dict[str, float]:
    """Return the trained tokens per second of the three ways."""
    config = TuningConfig(batch_size=batch_size, shuffle=False)
    many = [
        _job(engine, config, (turns + 1) * batch_size, length, seed) for seed in range(num_jobs)
    ]
    turn_by_turn = [
        _job(engine, config, (turns + 1) * batch_size, length, seed) for seed in range(num_jobs)
    ]
    whole = replace(config, batch_size=batch_size * num_jobs)
    one = [_job(engine, whole, (turns + 1) * batch_size * num_jobs, length, 0)]
    seconds: dict[str, list[float]] = {"at_once": [], "one_after_another": [], "one_job": []}
    for _ in range(turns + 1):  # the first warms up
        seconds["at_once"].append(_step_s(engine, many))
        seconds["one_after_another"].append(sum(_step_s(engine, [job]) for job in turn_by_turn))
        seconds["one_job"].append(_step_s(engine, one))
    num_tokens = num_jobs * batch_size * length
    return {name: num_tokens / median(found[1:]) for name, found in seconds.items()}


def _job(engine: Engine, config: TuningConfig, num_examples: int, length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(engine.device.info.vocab_size, (num_examples, length), generator=generator)
    config = replace(config, max_sequence_length=length)
    examples = [Example(tokens=tuple(tokens), trained=(True,) * length) for tokens in data.tolist()]
    job = engine.submit(examples, config, adapter=LORA)
    engine.pause_job(job)
    return job


def _step_s(engine: Engine, jobs: Sequence[str]) -> float:
    """Return the seconds until each of these jobs has run an optimizer step."""
    for job in jobs:
        engine.resume_job(job)
    start = now_s(torch.device(engine.device.info.device))
    stepped: set[str] = set()
    while len(stepped) < len(jobs):
        for event in engine.step():
            if isinstance(event, JobEvent) and event.kind == "step":
                stepped.add(event.job)
                if engine.job(event.job).state == "running":
                    engine.pause_job(event.job)
    return now_s(torch.device(engine.device.info.device)) - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory-bytes", type=int, default=3 << 30)
    add_save_option(parser)
    options = parser.parse_args()
    config = EngineConfig(policy="tuning-only", memory_bytes=options.memory_bytes)
    engine = Engine.load(options.model, config, dtype=options.dtype, device="cpu", with_text=False)
    rows = []
    for batch_size in options.batch_sizes:
        result = run(engine, options.jobs, batch_size, options.length, options.turns)
        print(batch_size, {name: round(rate, 1) for name, rate in result.items()}, flush=True)
        rows.append({"batch_size": batch_size, **result})
    print_result(
        "many_jobs", {"jobs": options.jobs, "length": options.length, "rows": rows}, options.save
    )


if __name__ == "__main__":
    main()
