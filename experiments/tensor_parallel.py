"""Two ranks of one thread each beside one process of two threads, in turns: decode steps and
fine-tuning on a CPU.

    python -m experiments.tensor_parallel --runs 9        # on an otherwise idle machine

Each side is an engine in a process of its own, which holds the model while the experiment runs and
waits while the other side has its turn. Times are medians over turns; a ratio is one process's time
over that of the ranks, so above 1 the ranks are faster. Prints a table, and one line of JSON.
"""

import argparse
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.process_memory import bound_compiled_products, keep_freed_memory
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.scheduling.policies import make_policy
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from experiments.results import add_save_option, print_result

CONTEXT, NUM_DECODED, ROWS = 512, 16, 512
POOL_BYTES = 2 << 30
LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")
TASKS = ("decode 1", "decode 8", "fine-tuning")
# By name: number of ranks, and threads of each.
SIDES = {"one process": (1, 2), "two ranks": (2, 1)}
# Threads of the side that has just had its turn spin for a moment.
PAUSE_S = 0.2


class Side:
    """An engine, and the seconds that each task takes on it."""

    def __init__(
        self, model: str, dtype: str, num_ranks: int, threads: int, num_turns: int
    ) -> None:
        config = EngineConfig(memory_bytes=POOL_BYTES // num_ranks, tensor_parallel=num_ranks)
        self._engine = Engine.load(
            model, config, dtype=dtype, device="cpu", threads=threads, with_text=False
        )
        self._generator = torch.Generator().manual_seed(0)
        self._num_turns = num_turns
        self._is_tuning = False

    def seconds(self, task: str) -> float:
        """Return the seconds of a decode step, or of an optimizer step over one sequence."""
        kind, _, number = task.partition(" ")
        return self._decode_s(int(number)) if kind == "decode" else self._tuning_s()

    def _decode_s(self, num_requests: int) -> float:
        engine = self._engine
        engine.policy = make_policy("inference-only", {})
        params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODED + 4, ignore_eos=True)
        for prompt in self._tokens(num_requests, CONTEXT):
            engine.add_tokens(prompt, params, slo=Slo(ttft_s=1e3, tpot_s=1e3))
        steps: list[float] = []
        while engine.has_requests:
            start_s = time.perf_counter()
            engine.step()
            rows = engine.last_plan.rows
            if len(rows) == num_requests and all(each.kind == "decode" for each in rows):
                steps.append(time.perf_counter() - start_s)
        return median(steps)

    def _tuning_s(self) -> float:
        engine = self._engine
        engine.policy = make_policy("tuning-only", {})
        if not self._is_tuning:
            examples = [
                Example(tokens=tuple(tokens), trained=(True,) * ROWS)
                for tokens in self._tokens(self._num_turns, ROWS)
            ]
            engine.submit(
                examples, TuningConfig(batch_size=1, max_sequence_length=ROWS), adapter=LORA
            )
            self._is_tuning = True
        start_s = time.perf_counter()
        while not any(
            isinstance(event, JobEvent) and event.kind == "step" for event in engine.step()
        ):
            pass
        return time.perf_counter() - start_s

    def _tokens(self, number: int, length: int) -> list[list[int]]:
        vocab_size = self._engine.device.info.vocab_size
        result: list[list[int]] = torch.randint(
            vocab_size, (number, length), generator=self._generator
        ).tolist()
        return result


def serve(model: str, dtype: str, num_ranks: int, threads: int, num_turns: int) -> None:
    """Run one side: a task per line, answered with its seconds."""
    keep_freed_memory()
    bound_compiled_products()
    side = Side(model, dtype, num_ranks, threads, num_turns)
    print("ready", flush=True)
    for line in sys.stdin:
        print(side.seconds(line.strip()), flush=True)


class SideProcess:
    """A side in a process of its own."""

    def __init__(self, name: str, model: str, dtype: str, num_turns: int) -> None:
        num_ranks, threads = SIDES[name]
        arguments = [
            "--model",
            model,
            "--dtype",
            dtype,
            "--serve",
            str(num_ranks),
            str(threads),
            str(num_turns),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.tensor_parallel", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._said() == "ready"

    def seconds(self, task: str) -> float:
        """Run a task, and return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(task + "\n")
        self._process.stdin.flush()
        return float(self._said())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(model: str, dtype: str, runs: int) -> dict[str, Any]:
    """Return medians of both sides by task, in milliseconds, and their ratio; the first turn of
    each only warms up.
    """
    sides = {name: SideProcess(name, model, dtype, runs + 1) for name in SIDES}
    result: dict[str, Any] = {}
    for task in TASKS:
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(runs + 1):
            for name in sides if turn % 2 else reversed(sides):
                seconds[name].append(sides[name].seconds(task))
                time.sleep(PAUSE_S)
        one, two = (1e3 * median(times[1:]) for times in seconds.values())
        result[task] = {
            "one_process_ms": round(one, 3),
            "two_ranks_ms": round(two, 3),
            "ratio": round(one / two, 3),
        }
        print(f"{task:12} {one:10.2f} ms {two:10.2f} ms   {one / two:.3f}", flush=True)
    for side in sides.values():
        side.close()
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:qwen2.5-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.dtype, *options.serve)
        return
    print(f"{'':12} {'1 process × 2':>13} {'2 ranks × 1':>13}   ratio")
    result = measure(options.model, options.dtype, options.runs)
    print_result(
        "tensor_parallel",
        {"model": options.model, "dtype": options.dtype, "runs": options.runs, **result},
        options.save,
    )


if __name__ == "__main__":
    main()
