"""Measurement of decoding, beside one read of the weights and the cache, transformers, and
OpenVINO.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from coserve.bench.baselines import decode_step_s, transformers_model
from coserve.bench.machine import now_s, read_bytes_per_s, weight_bytes
from coserve.bench.openvino import OpenVino
from coserve.devices.counting import model_counts
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models.backbone import Backbone
from coserve.scheduling.slo import Slo

_NUM_TOKENS = 16
MAX_TOKENS = _NUM_TOKENS + 4
_BATCHES = (1, 4, 8)


def run(
    backbone: Backbone,
    *,
    runs: int,
    context: int = 512,
    batches: Sequence[int] = _BATCHES,
    openvino: OpenVino | None = None,
) -> dict[str, Any]:
    """Measure decode steps of the engine, of transformers, and of OpenVINO if it is given, in
    turns.

    Args:
        backbone: The model.
        runs: Number of turns; results are medians over them.
        context: Tokens of each prompt.
        batches: Numbers of requests.
        openvino: The model in OpenVINO.
    """
    page_bytes = kv_page_bytes(backbone, 16)
    pages = max(batches) * (-(-(context + 2 * _NUM_TOKENS) // 16) + 1)
    engine = Engine.from_backbone(
        backbone, EngineConfig(policy="inference-only", memory_bytes=2 * pages * page_bytes)
    )
    model = transformers_model(backbone)
    generator = torch.Generator().manual_seed(0)
    per_key = model_counts(backbone).kv_bytes_per_key
    rows = []
    for batch in batches:
        ours, theirs, floors = [], [], []
        openvino_s: list[float] = []
        for _ in range(runs):
            prompts = torch.randint(
                backbone.architecture.vocab_size, (batch, context), generator=generator
            )
            ours.append(engine_step_s(engine, prompts.tolist()))
            theirs.append(decode_step_s(model, prompts.to(backbone.device), num_tokens=_NUM_TOKENS))
            if openvino is not None:
                openvino_s.append(openvino.step_s(prompts.tolist(), num_tokens=_NUM_TOKENS))
            # The mean context while the tokens are generated.
            num_bytes = weight_bytes(backbone) + batch * (context + _NUM_TOKENS // 2) * per_key
            floors.append(num_bytes / read_bytes_per_s(backbone.device))
        rows.append(
            {
                "batch": batch,
                "context": context,
                "step_ms": 1e3 * median(ours),
                "floor_ms": 1e3 * median(floors),
                "transformers_ms": 1e3 * median(theirs),
                **({"openvino_ms": 1e3 * median(openvino_s)} if openvino_s else {}),
            }
        )
    return (
        {"rows": rows} if openvino is None else {"openvino_version": openvino.version, "rows": rows}
    )


def engine_step_s(
    engine: Engine, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None] | None = None
) -> float:
    """Return the median seconds of a step in which every request decodes.

    Args:
        engine: The engine.
        prompts: Token ids of each request.
        adapters: Adapter of each request; None: no request has one.
    """
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    # Prompts are not cut into pieces for the sake of requests that decode.
    relaxed = Slo(ttft_s=1e3, tpot_s=1e3)
    for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True):
        engine.add_tokens(prompt, params, adapter=adapter, slo=relaxed)
    steps = []
    while engine.has_requests:
        start = now_s(torch.device(engine.device.info.device))
        engine.step()
        if len(engine.last_plan.rows) == len(prompts) and all(
            rows.kind == "decode" for rows in engine.last_plan.rows
        ):
            steps.append(now_s(torch.device(engine.device.info.device)) - start)
    return median(steps)
