"""Measurement of training an adapter: speed, and memory of activations, beside PEFT on the same
data.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.baselines import PeftTrainer
from coserve.bench.machine import now_s
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.models.backbone import Backbone
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

LORA = LoraConfig(r=16, alpha=32, target_modules="all-linear")
_SEQUENCES = (512, 1024)
_MEMORY_BYTES = 4 << 30
# The second of a shape may be captured on a GPU.
_WARM_UP_TURNS = 2


def run(
    backbone: Backbone,
    *,
    runs: int,
    compiled: bool = True,
    max_recompute: float = 0.0,
    dropout: float = 0.0,
    sequences: Sequence[int] = _SEQUENCES,
) -> dict[str, Any]:
    """Measure optimizer steps of one sequence each, in turns.

    Args:
        backbone: The model.
        runs: Number of turns; results are medians over them.
        compiled: Whether to measure PEFT under torch.compile, too, which compiles for each length
            in the turn that warms up.
        max_recompute: Share of extra FLOPs of a second job that keeps fewer activations; 0: no such
            job.
        dropout: Dropout of the LoRAs of all sides.
        sequences: Lengths of the sequences.
    """
    alone = EngineConfig(policy="tuning-only", memory_bytes=_MEMORY_BYTES)
    engine = Engine.from_backbone(backbone, alone)
    sparing = Engine.from_backbone(backbone, alone) if max_recompute else None
    lora = replace(LORA, dropout=dropout)
    peft = PeftTrainer(backbone, lora, TuningConfig().optimizer)
    rows = []
    for length in sequences:
        generator = torch.Generator().manual_seed(length)
        data = torch.randint(
            backbone.architecture.vocab_size, (runs + _WARM_UP_TURNS, length), generator=generator
        )
        config = TuningConfig(batch_size=1, shuffle=False)
        job = _EngineJob(engine, data.tolist(), config, lora)
        steps: dict[str, Callable[[Tensor], float]] = {
            "tokens_per_s": job.step_s,
            "peft_tokens_per_s": peft.step_s,
        }
        recomputing = None
        if sparing is not None:
            recomputing = _EngineJob(
                sparing, data.tolist(), replace(config, max_recompute=max_recompute), lora
            )
            steps["recompute_tokens_per_s"] = recomputing.step_s
        if compiled:
            steps["peft_compiled_tokens_per_s"] = partial(peft.step_s, compiled=True)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(runs + _WARM_UP_TURNS):
            for name, step_s in steps.items():
                seconds[name].append(step_s(data[index : index + 1].to(backbone.device)))
        rows.append(
            {
                "sequence": length,
                **{
                    name: length / median(turns[_WARM_UP_TURNS:]) for name, turns in seconds.items()
                },
                "activation_bytes": job.activation_bytes,
                "peft_activation_bytes": peft.activation_bytes(data[:1].to(backbone.device)),
            }
        )
        if recomputing is not None:
            rows[-1]["recompute_activation_bytes"] = recomputing.activation_bytes
    return {"rows": rows}


class _EngineJob:
    """A job whose optimizer steps run one at a time."""

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[Sequence[int]],
        config: TuningConfig,
        lora: LoraConfig,
    ) -> None:
        self._engine = engine
        config = replace(config, max_sequence_length=max(map(len, sequences)))
        examples = [
            Example(tokens=tuple(tokens), trained=(True,) * len(tokens)) for tokens in sequences
        ]
        self._job = engine.submit(examples, config, adapter=lora)
        self.activation_bytes = 0

    def step_s(self, tokens: Tensor) -> float:
        """Run the next step, which trains on these tokens, and return its seconds."""
        device = torch.device(self._engine.device.info.device)
        start = now_s(device)
        while True:
            events = self._engine.step()
            pages = self._engine.pool.num_pages_by_owner().get("activations", 0)
            self.activation_bytes = max(self.activation_bytes, pages * self._engine.pool.page_bytes)
            if any(isinstance(event, JobEvent) and event.kind == "step" for event in events):
                return now_s(device) - start
