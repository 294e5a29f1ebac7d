"""Decode steps of requests with adapters: none, one that all share, one each, and one each of mixed
rank and targets.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.adapters.peft_directory import save_adapter
from coserve.bench.decode import MAX_TOKENS, engine_step_s
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models.backbone import Backbone

_MIXED_RANKS = (4, 8, 16, 32)
_MIXED_TARGETS: tuple[str | tuple[str, ...], ...] = (
    "all-linear",
    ("q_proj", "v_proj"),
    ("o_proj", "down_proj"),
)


def run(
    backbone: Backbone, *, runs: int, num_requests: int = 8, rank: int = 16, context: int = 64
) -> dict[str, float | int]:
    """Measure decode steps of requests with adapters, in turns.

    Returns:
        Milliseconds, medians over the turns: decode_step_ms (no adapter), decode_step_shared_ms
            (one of this rank on all linear layers), decode_step_adapters_ms (one of this rank for
            each request) and decode_step_mixed_ms (one for each, of ranks 4 to 32 on all linear
            layers or some).
    """
    page_bytes = kv_page_bytes(backbone, 16)
    num_pages = 2 * num_requests * (-(-(context + MAX_TOKENS) // 16) + 1)
    engine = Engine.from_backbone(
        backbone, EngineConfig(policy="inference-only", memory_bytes=2 * num_pages * page_bytes)
    )
    same = [LoraConfig(r=rank, alpha=2 * rank, target_modules="all-linear")] * num_requests
    mixed = [
        LoraConfig(r=r, alpha=2 * r, target_modules=_MIXED_TARGETS[i % len(_MIXED_TARGETS)])
        for i in range(num_requests)
        for r in [_MIXED_RANKS[i % len(_MIXED_RANKS)]]
    ]
    sides: dict[str, Sequence[str | None]] = {
        "decode_step_ms": [None] * num_requests,
        "decode_step_shared_ms": ["same-0"] * num_requests,
        "decode_step_adapters_ms": _load(engine, backbone, "same", same),
        "decode_step_mixed_ms": _load(engine, backbone, "mixed", mixed),
    }
    generator = torch.Generator().manual_seed(0)
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs + 1):  # the first turn warms up
        prompts = torch.randint(
            backbone.architecture.vocab_size, (num_requests, context), generator=generator
        ).tolist()
        for name, adapters in sides.items():
            times_s[name].append(engine_step_s(engine, prompts, adapters))
    times: dict[str, Any] = {name: 1e3 * median(turns[1:]) for name, turns in times_s.items()}
    return {"num_requests": num_requests, "rank": rank, "context": context, **times}


def _load(
    engine: Engine, backbone: Backbone, kind: str, configs: Sequence[LoraConfig]
) -> list[str]:
    """Load random adapters, one for each request, and return their names."""
    names = []
    with TemporaryDirectory() as place:
        for index, config in enumerate(configs):
            adapter, name = Adapter(backbone, config, seed=index), f"{kind}-{index}"
            generator = torch.Generator().manual_seed(index)
            for master in adapter.masters.values():
                master.copy_(torch.randn(master.shape, generator=generator).mul_(0.01))
            save_adapter(adapter, Path(place) / name)
            engine.load_adapter(name, str(Path(place) / name))
            names.append(name)
    return names
