"""A side of `experiments.compare.separate`, in a process of its own: `python -m
experiments.compare.separate_worker`.

The first line of input says which side it is; it answers once it is warm. Each further line is a
time to play for, by `time.perf_counter`, which is the same clock in all processes of a machine.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from random import Random
from typing import Any, Protocol

from coserve.sandbox.parent_death import end_with_parent
from coserve.workloads.summary import RequestOutcome

_WARM_UP_TOKENS = 64
_MAX_MEMORY_SHARE = 0.6
# How long answers are waited for before the next arrival is looked at.
_POLL_S = 0.005


class Side(Protocol):
    """A side of an arrangement."""

    def play(self, told: dict[str, Any]) -> dict[str, Any]:
        """Do what a message says until its time is over, and return the answer."""


class Server:
    """A server with transformers' continuous batching in this process; it needs no HTTP, which is
    in its favour.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        from coserve.bench.baselines import transformers_model
        from coserve.models import load_backbone

        backbone = load_backbone(setup["model"], dtype=setup["dtype"], device=setup["device"])
        self._vocab, self._seed = range(backbone.architecture.vocab_size), setup["seed"]
        model = transformers_model(backbone)
        del backbone
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                max_memory_percent=_memory_share(setup["memory_bytes"]),
                max_batch_tokens=setup["max_batch_rows"],
            ),
        )
        self._manager.start()
        self._num_plays = 0
        self._manager.add_request([1] * _WARM_UP_TOKENS, request_id="warm", max_new_tokens=4)
        if (done := self._manager.get_result(timeout=300)) is None or done.error:
            raise RuntimeError(
                f"transformers' continuous batching does not run here: {done and done.error}"
            )

    def play(self, told: dict[str, Any]) -> dict[str, Any]:
        """Play a trace open loop, and return the outcomes of answered requests."""
        self._num_plays += 1
        trace, start_s, num_sent = told["trace"], told["start_s"], 0
        outcomes: list[RequestOutcome] = []
        prompts = [
            Random(f"{self._seed}/{i}").choices(self._vocab, k=each[1])
            for i, each in enumerate(trace)
        ]
        while (
            len(outcomes) < len(trace) and (now_s := time.perf_counter() - start_s) < told["end_s"]
        ):
            while num_sent < len(trace) and trace[num_sent][0] <= now_s:
                self._manager.add_request(
                    prompts[num_sent],
                    request_id=self._name(num_sent),
                    max_new_tokens=trace[num_sent][2],
                    record_timestamps=True,
                )
                num_sent += 1
            done = self._manager.get_result(timeout=_POLL_S)
            if done is not None and done.request_id.startswith(self._name("")):
                index = int(done.request_id.partition("/")[2])
                outcomes.append(
                    _outcome(
                        index,
                        trace[index],
                        [at_s - start_s for at_s in done.timestamps],
                        done.error,
                    )
                )
        for index in range(num_sent):
            self._manager.cancel_request(self._name(index))
        return {"outcomes": [asdict(outcome) for outcome in outcomes]}

    def _name(self, index: int | str) -> str:
        return f"{self._num_plays}/{index}"


def _memory_share(memory_bytes: int | None) -> float | None:
    """Return the share of the machine's memory that transformers may take for pages and masks."""
    if memory_bytes is None:
        return None
    return min(
        _MAX_MEMORY_SHARE,
        memory_bytes / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    )


def _outcome(
    index: int, request: tuple[float, int, int], times_s: list[float], error: str | None
) -> RequestOutcome:
    at_s, num_prompt_tokens, _ = request
    later = len(times_s) - 1
    return RequestOutcome(
        index=index,
        arrival_s=at_s,
        end_s=times_s[-1] if times_s else at_s,
        ttft_s=times_s[0] - at_s if times_s else None,
        tpot_s=(times_s[-1] - times_s[0]) / later if later > 0 else None,
        gaps_s=tuple(after - before for before, after in pairwise(times_s)),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=len(times_s),
        error=error,
    )


class Trainer:
    """A trainer with PEFT and autograd, one optimizer step after the other, for the tokens of any
    number of jobs.

    On a CPU the sequences of a batch run one after the other and their gradients are added up,
    which is 1.2 times as fast as side by side (62.6 and 52.6 tokens/s: Qwen2.5-0.5B's shape, four
    of 512 tokens, two cores with AVX-512).
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch

        from coserve.bench.baselines import PeftTrainer
        from coserve.bench.cells import LORA
        from coserve.models import load_backbone
        from coserve.tuning.config import OptimizerConfig

        self._torch = torch
        backbone = load_backbone(setup["model"], dtype=setup["dtype"], device=setup["device"])
        self._vocab_size, self._device = backbone.architecture.vocab_size, backbone.device
        self._trainer = PeftTrainer(backbone, LORA, OptimizerConfig())
        self._batch, self._sequence, self._lengths = (
            setup["batch"],
            setup["sequence"],
            setup["lengths"],
        )
        self._at_once, self._num_done = 1 if setup["device"] == "cpu" else self._batch, 0
        self._random = Random(setup["seed"])
        self._backward([min(self._sequence, _WARM_UP_TOKENS)] * self._at_once)
        self._trainer.update()

    def play(self, told: dict[str, Any]) -> dict[str, Any]:
        """Run optimizer steps until the end; a batch that ends after it counts by its share before
        it.
        """
        end_s, trained = told["start_s"] + told["seconds"], 0.0
        time.sleep(max(0.0, told["start_s"] - time.perf_counter()))
        while (began_s := time.perf_counter()) < end_s:
            num_tokens = self._next()
            trained += num_tokens * min(1.0, (end_s - began_s) / (time.perf_counter() - began_s))
        return {"num_trained": trained}

    def _next(self) -> int:
        """Run as many sequences as run side by side, and the optimizer step that is due; return
        their tokens.
        """
        lengths = self._random.choices(self._lengths or [self._sequence], k=self._at_once)
        lengths = [min(length, self._sequence) for length in lengths]
        self._backward(lengths)
        self._num_done += len(lengths)
        if self._num_done % self._batch == 0:
            self._trainer.update()
        return sum(lengths)

    def _backward(self, lengths: list[int]) -> None:
        """Run forward and backward; shorter sequences are padded, which does not count."""
        tokens = self._torch.randint(
            self._vocab_size, (len(lengths), max(lengths)), device=self._device
        )
        counts = self._torch.tensor(lengths, device=self._device)
        self._trainer.backward(tokens, lengths=None if len(set(lengths)) == 1 else counts)


def main() -> None:
    """Answer messages until the input ends."""
    end_with_parent()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    setup = json.loads(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):  # before PyTorch starts threads
        os.sched_setaffinity(0, setup["cores"])
    import torch

    torch.set_num_threads(len(setup["cores"]))
    side: Side = Server(setup) if setup["role"] == "serve" else Trainer(setup)
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(side.play(json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
